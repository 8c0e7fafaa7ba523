"""Clients and what each has seen: its request over HTTP, and the sequences that a router made of it."""

from enum import StrEnum, auto
from typing import Any

from baton.core.ids import RequestId, SequenceId
from baton.core.messages import AdapterRef
from router.decisions.events import Submit
from simulator.faults.exchange import Exchange
from simulator.faults.model import Expected


class Ending(StrEnum):
    """The way in which a client's request ended, or one sequence of it."""

    FINISHED = auto()
    FAILED = auto()
    GONE = auto()
    """The client left, or the router cancelled the sequence because its answer was complete."""
    BROKEN = auto()
    """The router died."""
    REFUSED = auto()
    """The client came when no router listened."""


class RequestKind(StrEnum):
    COMPLETION = auto()
    BEAM = auto()
    EMBEDDING = auto()


PATHS = {
    RequestKind.COMPLETION: "/v1/completions",
    RequestKind.BEAM: "/v1/completions",
    RequestKind.EMBEDDING: "/v1/embeddings",
}


class SimSequence:
    """One sequence as a router submitted it, and what came of it."""

    __slots__ = (
        "client",
        "ended_s",
        "ending",
        "epoch",
        "epoch_s",
        "expected",
        "failure",
        "placements",
        "received",
        "state",
        "submit",
        "submitted_s",
        "token_times_s",
    )

    def __init__(self, client: "SimClient", submit: Submit, expected: Expected, now_s: float) -> None:
        self.client, self.submit, self.expected = client, submit, expected
        self.submitted_s = now_s
        self.received: list[int] = []
        self.token_times_s: list[float] = []
        """Virtual instants at which the first and the newest token were delivered."""
        self.ending: Ending | None = None
        self.ended_s = 0.0
        self.failure = ""
        self.epoch, self.epoch_s = 0, now_s
        """The newest attempt, and when it began."""
        self.state = "queued"
        self.placements = 0

    @property
    def seq_id(self) -> SequenceId:
        return self.submit.seq_id

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for its first placement."""
        return self.ending is None and not self.placements


class SimClient:
    """One client with one request."""

    __slots__ = (
        "adapter",
        "arrived_s",
        "arrives_s",
        "body",
        "comes_back",
        "completion_tokens",
        "ended_s",
        "ending",
        "exchange",
        "is_hasty",
        "is_returning",
        "is_slow",
        "kind",
        "leaves_after_s",
        "loops",
        "name",
        "owner",
        "promised_by",
        "prompts",
        "router_index",
        "router_name",
        "sequences",
        "tenant",
    )

    def __init__(
        self,
        name: str,
        *,
        kind: RequestKind,
        prompts: tuple[tuple[int, ...], ...],
        body: dict[str, Any],
        tenant: str,
        owner: int,
    ) -> None:
        self.name, self.kind, self.prompts, self.body = name, kind, prompts, body
        self.tenant = tenant
        self.owner = owner
        """A number for tenant and adapter: whose KV the request may use."""
        self.adapter: AdapterRef | None = None
        self.loops = False
        self.arrives_s = self.arrived_s = 0.0
        self.leaves_after_s: float | None = None
        self.is_hasty = False
        """The request goes to the service with the short deadline."""
        self.is_slow = False
        """The client reads nothing of a stream for a while."""
        self.comes_back = False
        """The client comes again when a refusal names the time."""
        self.promised_by = ""
        """The router that reserved a place for the client, and told it when to come again."""
        self.is_returning = False
        """The client comes again after a refusal."""
        self.completion_tokens = 0
        """Tokens of the complete answer."""
        self.router_index = 0
        self.router_name = ""
        self.sequences: list[SimSequence] = []
        self.exchange: Exchange | None = None
        self.ending: Ending | None = None
        self.ended_s = 0.0

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.name)

    @property
    def path(self) -> str:
        return PATHS[self.kind]

    @property
    def slo_class(self) -> str:
        return self.body.get("baton", {}).get("slo_class", "")

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    def again(self, name: str) -> "SimClient":
        """Return the same client with the same request, which comes once more."""
        other = SimClient(
            name, kind=self.kind, prompts=self.prompts, body=self.body, tenant=self.tenant, owner=self.owner
        )
        other.adapter, other.loops, other.is_hasty = self.adapter, self.loops, self.is_hasty
        other.router_index, other.is_returning = self.router_index, True
        return other
