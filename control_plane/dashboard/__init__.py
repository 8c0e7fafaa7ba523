"""The dashboard for operators, in a process of its own beside the control plane."""
