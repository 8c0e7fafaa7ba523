"""Expert ranks, their callers and their control plane under virtual time, with seeded faults.

The decisions are production's: `control_plane.experts.group` says what ranks load and which map callers use,
and `engine.scheduling.expert_routes` which ranks a caller sends rows to. Processes, their streams, the slots
in which rows travel and the time that everything takes are modelled.
"""
