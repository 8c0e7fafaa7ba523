"""The process of a follower whose KV the leader does not map: its orders, and its part in KV transfer.

`python -m worker.stage_follower PARENT_PID`, with a `StageSetup` as JSON on its standard input.
"""

import logging
import sys

import msgspec

from engine.execution.follower import bind_to, follow
from worker.part_thread import PartThread, StageSetup


def main(parent_pid: int) -> int:
    bind_to(parent_pid)
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=StageSetup)
    if (part := setup.part) is None:
        return follow(setup.follower)
    return follow(setup.follower, lambda executor: PartThread(part, executor))


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    logging.shutdown()
    sys.exit(code)
