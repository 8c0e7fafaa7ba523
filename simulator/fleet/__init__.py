"""A whole cluster under a production trace, in virtual time: production router, modelled workers.

`simulator.faults` runs every step of small clusters to find bugs; this runs large clusters to find figures. A
worker here is a macro model: one event per chunk of a prompt and per change of the decoding batch.
"""
