"""Settings for all tests."""

import gc
import os
import signal
import sys

from hypothesis import settings

from tests.certificates import secure_tests

# Tests start processes while gRPC has threads; its fork handlers only get in the way.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Several torch processes share the cores here, and threads that spin while they wait would slow the others
# down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests start hundreds of processes, each of which would compile hundreds of our files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell has what it starts in the background ignore SIGINT, and children inherit that: processes that tests
# interrupt would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every run has the same cases, so that only a change can change the result; `make explore` draws others.
# No example has a deadline: a busy machine is no defect.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", print_blob=True, deadline=None)
settings.load_profile("explore" if os.environ.get("BATON_EXPLORE") else "repeatable")

# With BATON_TEST_TLS=1 all tests, and every process that they start, use mutual TLS.
secure_tests()


def pytest_collection_finish():
    """Modules and thousands of collected tests stay until the end. A full collection of garbage would look at
    all of them, and simulations begin with one each."""
    gc.collect()
    gc.freeze()
