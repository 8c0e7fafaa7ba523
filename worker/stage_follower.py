"""The process of a follower whose KV the leader does not map: its orders, and its part in KV transfer.

`engine.execution.follower_process` starts it, with a `StageSetup` as JSON on its standard input.
"""

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
