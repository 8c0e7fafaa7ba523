"""What a process of a worker needs to know to use expert ranks."""

import msgspec

from baton.config.experts import ExpertsConfig
from baton.core.ids import WorkerId


class ExpertAccess(msgspec.Struct, frozen=True):
    control_address: str
    """The control plane, which announces the map."""
    group: str
    """The expert ranks' group, see `baton.core.experts.group_name`."""
    worker_id: WorkerId
    caller: str
    """Worker id and rank: "decode-0.1f3a/0"."""
    config: ExpertsConfig
