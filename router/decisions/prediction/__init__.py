"""How long things will take, per worker, in seconds: an analytic model, corrected by what happens. Pure."""
