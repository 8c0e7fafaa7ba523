"""`baton chaos`: a drill on a real cluster of several hosts on this machine, under seeded faults."""
