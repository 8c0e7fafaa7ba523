"""What operators look at, in a process of its own beside the control plane."""
