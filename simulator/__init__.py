"""Two simulators over production decisions and one virtual clock: the fault simulator (`faults`) finds bugs,
the fleet simulator (`fleet`) predicts large clusters."""
