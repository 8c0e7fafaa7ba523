"""Defects of this software that one request met: they end that request, and the router goes on."""

import asyncio
import traceback

INTERNAL = "internal error"
"""What a client hears of a defect."""

NOT_DEFECTS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that are no defects though they are no `Exception`. A panic of a native library is a defect, and
no `Exception` either."""

FRAMES_MAX = 8
"""Most frames of a traceback that a report has, counted from its inner end. A recursion has thousands."""
CHARACTERS_MAX = 500


def report(error: BaseException) -> str:
    """Return the kind, the message and the innermost frames of an error, without the frames of its causes."""
    frames = "".join(traceback.format_tb(error.__traceback__, limit=-FRAMES_MAX))
    return f"{type(error).__name__}: {str(error)[:CHARACTERS_MAX]}\n{frames}"
