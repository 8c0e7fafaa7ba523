"""Workers of several ranks on the cores of this machine, beside workers of one rank on the same cores."""
