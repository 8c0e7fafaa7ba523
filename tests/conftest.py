"""For all tests."""

import os

from hypothesis import settings

from tests.certificates import secure_tests

# Tests start processes while gRPC has threads; its fork handlers only get in the way.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Several torch processes share the cores here: threads that spin while they wait cost the others dearly.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same cases in every run, so that a change is judged by what it changes; `make explore` draws others.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", print_blob=True)
settings.load_profile("explore" if os.environ.get("BATON_EXPLORE") else "repeatable")

# With BATON_TEST_TLS=1 all of them have mutual TLS, and so has every process that they start.
secure_tests()
