"""For all tests."""

import os

# Tests start processes while gRPC has threads; its fork handlers only get in the way.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Several torch processes share the cores here: threads that spin while they wait cost the others dearly.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
