"""The fleet simulator: a whole cluster under a production trace, in virtual time, with production routers and
modelled workers.

The fault simulator (`simulator.faults`) runs every step of small clusters to find bugs; this one runs large
clusters to find figures. A worker here is a macro model: one event per chunk of a prompt and per change of
the decoding batch.
"""
