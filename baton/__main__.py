"""The entry point of the `baton` command, which `python -m baton` runs, too."""

import logging
import os
import platform
import sys

# gRPC logs every peer that closes its connection. Users of a command do not need these lines.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# No child goes on with the parent's connections: gRPC's handlers of a fork only get in its way.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if platform.machine() in ("x86_64", "AMD64"):  # elsewhere torch's own products may be OpenBLAS's
    # numpy starts a thread of OpenBLAS for each core, which spins for a while. We multiply nothing by it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def main() -> None:
    """Run the command line. A SetupError, wherever it is raised, prints one line and sets its own exit
    status."""
    from baton.core import garbage

    with garbage.uncollected():
        from baton.core.errors import SetupError
        from commands.app import app
        from commands.run import run_app
        from commands.standard_output import checked_stdout

    try:
        with checked_stdout():
            run_app(app, name="baton")
    except SetupError as error:
        print(f"baton: {error}", file=sys.stderr)
        logging.shutdown()
        raise SystemExit(error.exit_status) from None


if __name__ == "__main__":
    main()
