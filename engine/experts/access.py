"""What a process of a worker needs to know to use expert ranks."""

from dataclasses import dataclass, replace

import msgspec

from baton.config.experts import ExpertsConfig
from baton.core.ids import WorkerId


class _Travelling(msgspec.Struct, frozen=True):
    control_address: str
    group: str
    worker_id: WorkerId
    caller: str
    config: str
    start_timeout_s: float


@dataclass(frozen=True, slots=True)
class ExpertAccess:
    control_address: str
    """The control plane, which announces the map."""
    group: str
    """The expert ranks' group, see `baton.core.experts.group_name`."""
    worker_id: WorkerId
    caller: str
    """Worker id and rank: "decode-0.1f3a/0"."""
    config: ExpertsConfig
    start_timeout_s: float = 600.0
    """The longest time that a worker which starts waits until every expert has a rank."""

    def of_rank(self, rank: int) -> "ExpertAccess":
        """The access of another rank of the same worker."""
        return replace(self, caller=f"{self.worker_id}/{rank}")

    def to_json(self) -> str:
        config = self.config.model_dump_json()
        travelling = _Travelling(
            *(self.control_address, self.group, self.worker_id, self.caller, config, self.start_timeout_s)
        )
        return msgspec.json.encode(travelling).decode()

    @classmethod
    def from_json(cls, text: str) -> "ExpertAccess":
        found = msgspec.json.decode(text, type=_Travelling)
        config = ExpertsConfig.model_validate_json(found.config)
        control, timeout_s = found.control_address, found.start_timeout_s
        return cls(control, found.group, found.worker_id, found.caller, config, timeout_s)
