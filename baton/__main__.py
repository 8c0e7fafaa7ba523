"""The entry point of the `baton` command, which `python -m baton` runs, too."""

import logging
import os
import sys

# gRPC logs every peer that closes its connection. Users of a command do not need these lines.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def main() -> None:
    """Run the command line. A SetupError, wherever it is raised, prints one line and sets its own exit
    status."""
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
