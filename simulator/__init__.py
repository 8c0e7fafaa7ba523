"""Two simulators over production decisions: `faults` finds bugs, `fleet` predicts large clusters."""
