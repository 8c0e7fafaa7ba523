"""Triton decides when it is imported whether its kernels are interpreted: the tests that need that run in a
process of their own, see `test_interpreted.py`."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]
