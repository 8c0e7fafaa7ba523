"""Pure vocabulary shared by every process: no IO, no clock reads, no global random."""
