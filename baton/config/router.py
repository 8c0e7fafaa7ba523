"""Settings of the router: the public API, placement, admission, objectives."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.config.base import PlacementPolicyName, Seconds, SecretText, Section
from baton.core.policies import DEFAULT_PLACEMENT, PLACEMENT_POLICIES, choices_text


class RouterConfig(Section):
    host: str = "127.0.0.1"
    """Interface that the public API listens on."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port of the public API. 0: any free port."""
    tls_cert: str = ""
    """PEM file of the public API's certificate and its intermediate authorities. It is read again when it
    changes. Empty: plain HTTP, as behind a balancer that ends TLS."""
    tls_key: str = ""
    """PEM file of that certificate's private key, not encrypted."""
    chat_page: bool = True
    """Whether the router serves a chat page at /. The page uses the API as any client does, with a key that
    its user types in."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Routers that `baton serve` starts. They share the port, and the kernel gives each connection to one of
    them."""
    share_port: bool = False
    """Whether other routers on this machine may listen on the same port. `baton serve` sets it for its own.
    """
    peers: tuple[str, ...] = ()
    """Addresses (host:port) of other routers to follow, besides those that the directory lists."""
    peer_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port where other routers follow this one. 0: any free port."""
    policy: Annotated[
        PlacementPolicyName,
        Field(description=f"Placement: which workers run a request. {choices_text(PLACEMENT_POLICIES)}."),
    ] = DEFAULT_PLACEMENT
    any_role: bool = True
    """slo: whether a worker may run a whole request whatever its role, where that is predicted to be better
    than handing it over. False: only aggregated workers do."""
    quick_tokenizer: bool = True
    """Whether prompts are tokenised by fastokens, in a tenth of the time, where it was found to agree with
    the tokenizers library. The log says which one is used. False: always the tokenizers library."""
    predictor_error_max: Annotated[float, Field(gt=0)] = 0.75
    """slo: mean relative error of predicted TTFT (differences that do not matter left out) above which
    placement is by cached prefix instead, where predictions say no more than a constant would. /health and
    metrics say so."""
    load_bound: Annotated[float, Field(ge=1)] = 1.5
    """cached_prefix, and slo when it falls back: a worker with more than this multiple of the mean load is
    passed over."""
    disaggregate: bool = True
    """Whether prefill and decode may run on different workers. False: every request runs both phases on one
    worker."""
    fallback_to_other_pool: bool = True
    """Whether the other pool serves both phases when one pool is empty. /health and metrics then say
    degraded."""
    queue_requests_max: Annotated[int, Field(ge=0)] = 512
    """Sequences of a model that wait for a place. One more is refused with 503."""
    reject_below: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """A request that meets its objectives with less than this probability counts as late, see `slo.late`. 0:
    only when the time for its first token is over. Requests without objectives are never late."""
    queue_tenant_max: Annotated[int, Field(ge=0)] = 0
    """Largest number of waiting sequences of one tenant. 0: no bound of its own. When the queue is full, the
    tenants that have most in it give way."""
    hold_above_s: Annotated[float, Field(ge=0, le=60)] = 0.25
    """A sequence waits at the router while the worker that suits it has more than this many seconds to
    compute first: here its order can still change. 0: it is placed at once. Policies without predictions hold
    nothing."""
    queue_wait_s: Seconds = 30.0
    """Longest time that a sequence may wait for a place before it is refused with 503."""
    request_timeout_s: Seconds = 600.0
    """Deadline of a request, counted from its arrival."""
    attempts_max: Annotated[int, Field(ge=1, le=100)] = 8
    """Times that one sequence is placed before the client gets a 503."""
    retry_share: Annotated[float, Field(ge=0, le=10)] = 0.2
    """Retries allowed, as a part of the sequences that ended well in the last 10 s, in addition to
    `retry_floor`. Beyond it a client that has no token yet gets a 503 with the time after which to try again.
    The first loss of a sequence with its worker is not counted, see decision 0027, and neither is anything
    that follows from draining a worker."""
    retry_floor: Annotated[int, Field(ge=0)] = 10
    """Retries per 10 s that are always allowed."""
    breaker_failures: Annotated[int, Field(ge=0, le=1000)] = 5
    """Failures in a row, or half of 20 attempts, after which a worker gets no new sequences for
    `breaker_open_s`. Then it gets one at a time until one works. 0: never."""
    breaker_open_s: Seconds = 5.0
    """Seconds without new sequences after the first failure. They double each time that the worker fails
    again soon."""
    breaker_open_max_s: Seconds = 120.0
    """Largest value that `breaker_open_s` grows to."""
    breaker_share_max: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Largest part of a pool that breakers keep out at once. One worker of a pool always stays."""
    breaker_slow_factor: Annotated[float, Field(ge=0)] = 5.0
    """A worker counts as unhealthy when its steps slowed down this many times more than its peers' since they
    started. 0: slowness does not count."""
    hedge_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Part of the sequences that may get a backup attempt elsewhere when their first token is overdue. 0:
    none."""
    hedge_quantile: Annotated[float, Field(ge=0.5, le=0.9999)] = 0.99
    """A first token is overdue when this part of all first tokens would have come, as predicted, or as
    observed lately under a policy without predictions."""
    hedge_after_s: Seconds = 0.5
    """Least number of seconds after its placement before a sequence gets a backup attempt."""
    migrate_after_s: Annotated[float, Field(ge=0)] = 20.0
    """Seconds after which streams that still run on a draining worker go on elsewhere, if there is a place
    with the same weights and they would not end sooner where they are. 0: at once. More than
    `cluster.drain_timeout_s`: when the worker ends."""
    worker_silence_s: Seconds = 3.0
    """A worker whose session is silent for this long is suspected, and its sequences are placed again. It is
    much shorter than `cluster.member_lease_s`, since being wrong costs little."""
    body_bytes_max: Annotated[int, Field(gt=0)] = 8 * 2**20
    """Largest request body. A larger one is refused with 413."""
    connections_max: Annotated[int, Field(ge=1)] = 4096
    """Open connections of clients. One more is refused with 503 and closed."""
    headers_timeout_s: Seconds = 30.0
    """Longest time from opening a connection, or from a request's first byte, to the end of its headers. Then
    the answer is 408."""
    output_buffer_tokens_max: Annotated[int, Field(ge=16)] = 4096
    """Tokens buffered for a slow client before it is disconnected."""
    choices_max: Annotated[int, Field(ge=1, le=1024)] = 16
    """Largest `n` of a request."""
    adapter_loading: bool = True
    """Whether clients may load and unload LoRA adapters by /v1/load_lora_adapter and /v1/unload_lora_adapter,
    from any folder that routers and workers can read, and from the hub. False: only `model.adapters`."""
    keys: SecretText = ""
    """File (.toml, .yaml, .json) or Redis URL with API keys and their tenants, see `baton keys`. Everything
    under /v1 then needs a key. Empty: no keys, and one tenant."""
    budgets_url: SecretText = ""
    """Redis URL where routers count tenants' budgets together. Empty: `store.directory`, or else the control
    plane."""
    tenant_salt: SecretText = ""
    """Text that is mixed into every block hash. Clusters that share a store and must not share KV use
    different ones."""
    default_max_tokens: Annotated[int, Field(ge=1)] = 512
    """Default `max_tokens` of chat requests, bounded by the room left in the context. Completions use 16."""

    state_url: SecretText = ""
    """Redis URL where routers keep responses for `previous_response_id` together. Empty: `store.directory`,
    or else each router keeps its own."""
    responses_max: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """Responses of /v1/responses kept for each tenant, for `previous_response_id` and for reading them again.
    The least recently used one makes room. 0: none is kept."""
    responses_bytes_max: Annotated[int, Field(ge=2**16)] = 64 * 2**20
    """Bytes of all kept responses of a router, or of one tenant's in Redis. One may have a quarter of it."""
    responses_keep_s: Seconds = 86_400.0
    """Seconds for which a response is kept."""

    files_dir: str = ""
    """Folder where files and batches are kept, for all routers that share it. Empty: `files` and the port in
    $BATON_CACHE_DIR, by default ~/.cache/baton."""
    file_bytes_max: Annotated[int, Field(ge=1024)] = 200 * 2**20
    """Largest file that a client may upload."""
    files_bytes_max: Annotated[int, Field(ge=1024)] = 4 * 2**30
    """Bytes of all files of one tenant."""
    files_max: Annotated[int, Field(ge=1, le=100_000)] = 1000
    """Files of one tenant, results of batches included."""
    files_keep_s: Annotated[float, Field(gt=0, le=31_536_000)] = 2_592_000.0
    """Seconds after which files, and batches that are over, are deleted."""
    batches_max: Annotated[int, Field(ge=1, le=1000)] = 16
    """Batches of one tenant that wait or run."""
    batch_requests_max: Annotated[int, Field(ge=1, le=1_000_000)] = 50_000
    """Requests of one batch."""
    batch_in_flight_max: Annotated[int, Field(ge=0, le=4096)] = 16
    """Requests of batches that one router runs at once, while nothing waits for a place. 0: it runs none."""
    batch_slo_class: str = ""
    """Service class of the requests of batches. Empty: as of any other request of their tenant."""

    @model_validator(mode="after")
    def _certificate_with_key(self) -> "RouterConfig":
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ValueError(f"TLS of the public API needs tls_cert and tls_key: router.{missing} is missing")
        return self


class SloClass(Section):
    """Objectives that requests choose by name."""

    ttft_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Objective for the seconds from a request's arrival to its first token. 0: no objective."""
    tpot_s: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Objective for the seconds per output token after the first. 0: no objective."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Priority of requests that name none themselves. Lower goes first."""
    late: Literal["serve", "refuse", ""] = ""
    """What happens to a request that will miss its objectives. Empty: as `slo.late`."""
    queue_max: Annotated[int, Field(ge=0)] = 0
    """Sequences of this class that wait for a place. One more is refused. 0: no bound of its own."""


class SloConfig(Section):
    classes: dict[str, SloClass] = {}
    """Service classes by name, for example {"interactive": {"ttft_s": 0.5, "tpot_s": 0.05}}."""
    default: str = ""
    """Class of requests that choose none. Empty: they have no objectives."""
    models: dict[str, str] = {}
    """Class of requests by model or adapter, where neither the request nor its tenant names one."""
    tenants: dict[str, str] = {}
    """Class of a tenant's requests, where the request itself names none."""
    late: Literal["serve", "refuse"] = "serve"
    """What happens to a request that will miss its objectives, because `router.reject_below` says so or
    because the time for its first token is over while it waits. serve: it runs after all that can still meet
    theirs. refuse: 503 at once, with the time after which to try again."""

    @model_validator(mode="after")
    def _names_are_known(self) -> "SloConfig":
        for name in self.classes:
            if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                raise ValueError(f"classes: {name!r:.80} must be of letters, digits, '_', '.', '-'")
        used = {f"models.{m}": c for m, c in self.models.items()}
        used |= {f"tenants.{t}": c for t, c in self.tenants.items()}
        if self.default:
            used["default"] = self.default
        for where, name in used.items():
            if name not in self.classes:
                known = ", ".join(sorted(self.classes)) or "none"
                raise ValueError(f"{where}: there is no class {name!r:.80}; slo.classes has {known}")
        return self
