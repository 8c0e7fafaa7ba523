"""The `baton` command: `python -m baton` is the same."""

import logging
import os
import sys

# gRPC's own remarks (a peer that ends says goodbye) are not for whoever reads what a command says.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def main() -> None:
    """A SetupError, wherever it comes from, is one line and its own exit status."""
    from baton.core.errors import SetupError
    from commands.app import app
    from commands.run import run_app
    from commands.standard_output import telling

    try:
        with telling():
            run_app(app, name="baton")
    except SetupError as error:
        print(f"baton: {error}", file=sys.stderr)
        logging.shutdown()
        raise SystemExit(error.exit_status) from None


if __name__ == "__main__":
    main()
