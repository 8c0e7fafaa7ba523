"""Everything a router decides: requests, admission, placement, prediction, the prefix index.

Pure: the simulators run these objects unchanged."""
