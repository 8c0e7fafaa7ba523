"""The fault simulator: production decisions under virtual time, on a modelled GPU and network, with seeded
faults."""
