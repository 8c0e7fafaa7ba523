"""Compile the CPU kernels before a start needs them.

Without options they are compiled for this processor, into the cache folder. With --ahead they are compiled
for every class of processors, into the installation: once for an image, or for many machines.
"""

import argparse
import sys
import time
from pathlib import Path

from engine.native.build import AHEAD_FOLDER, NativeUnavailable, build, compile_ahead
from engine.native.classes import candidates

_EXAMPLES = """\
examples:
  python -m engine.native
  python -m engine.native --ahead
  python -m engine.native --ahead /kernels
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.native",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ahead",
        nargs="?",
        const=AHEAD_FOLDER,
        type=Path,
        metavar="FOLDER",
        help=f"compile every class into FOLDER, by default {AHEAD_FOLDER}, where a start looks for them",
    )
    ahead: Path | None = parser.parse_args(arguments).ahead
    try:
        if ahead is not None:
            return 0 if compile_ahead(ahead, _say) else 1
        return _compile_here()
    except NativeUnavailable as error:
        return _fail(error)
    except KeyboardInterrupt:
        return 130


def _compile_here() -> int:
    """Build the first class that this machine's compiler can, as a start does."""
    began_s = time.monotonic()
    try:
        classes = candidates()
    except ValueError as error:
        raise NativeUnavailable(str(error)) from error
    for one in classes:
        try:
            file = build(one)
        except NativeUnavailable as error:
            _fail(error)
        else:
            _say(f"CPU kernels of class {one.name}: {file} ({time.monotonic() - began_s:.0f} s)")
            return 0
    return 1


def _say(line: str) -> None:
    print(line, flush=True)


def _fail(error: NativeUnavailable) -> int:
    print("\n".join(filter(None, (f"kernels are not compiled: {error}", error.log))), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
