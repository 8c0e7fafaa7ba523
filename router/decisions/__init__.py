"""The decisions of a router: request flow, admission, placement, prediction and the prefix index.

All of it is pure, so that the simulators run the same objects as production."""
