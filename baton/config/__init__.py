"""Every setting, declared once. Command line, environment and documentation are derived from here.

A value is what was *asked for*: frozen, bounded, unknown keys refused. What follows from it
(`baton.core.geometry`) and what is measured (`WorkerHello`, `LoadReport`) are other types.

Environment: `BATON_` + section + `__` + field, for example BATON_TRANSFER__LEASE_S=5.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton.config.base import Seconds, SecretText, Section
from baton.config.models import NAME_PATTERN, OWN_SECTIONS, ModelEntry, with_own
from baton.config.operators import AccessConfig, DashboardConfig, TelemetryConfig, TlsConfig
from baton.config.router import RouterConfig, SloConfig
from baton.core.transfer_backends import DEFAULT_BACKENDS, BackendName, described


class ModelConfig(Section):
    path: str = ""
    """Hugging Face folder, hub id, or GGUF file."""
    name: str = ""
    """Name clients use; empty: the folder's or hub id's last part."""
    revision: str = "main"
    """Hub revision; ignored for a folder."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV. auto: what the checkpoint's config.json says."""
    device: str = "cpu"
    """Torch device: cpu, cuda, cuda:1 …"""
    context_tokens_max: Annotated[int, Field(ge=0)] = 0
    """Prompt plus generated tokens of one sequence; 0: what the model's config.json says."""
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """Weights are quantised to this when they are loaded; a checkpoint that is quantised already (GPTQ,
    AWQ, compressed-tensors, MXFP4, GGUF) is recognised by itself and wants none here."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Of the KV cache. auto: as `dtype`. int8 and fp8 have one scale per head and token."""
    reasoning_parser: str = ""
    """How reasoning segments are told from the answer; empty: by the model's family. `none` turns it off."""
    tool_parser: str = ""
    """How tool calls are found in the text; empty: by the model's family. `none` turns it off."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters served from the start, each NAME=FOLDER_OR_HUB_ID."""


class EngineConfig(Section):
    block_tokens: Annotated[int, Field(ge=1, le=512)] = 32
    """Token positions in one KV block; the same in the whole cluster."""
    kv_bytes: Annotated[int, Field(gt=0)] = 512 * 2**20
    """KV pool of one worker."""
    step_tokens_max: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Token budget of one engine step, prompt chunks and decodes together."""
    step_timeout_s: Seconds = 60.0
    """One engine step; a worker whose step takes longer ends, and is started anew: its device hangs."""
    batch_sequences_max: Annotated[int, Field(ge=1, le=4096)] = 64
    """Sequences in one step."""
    waiting_sequences_max: Annotated[int, Field(ge=1)] = 256
    """Sequences accepted and not started; one more is refused."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads that compute, of one worker; 0: its share of the cores."""
    kernels: Literal["auto", "torch", "native", "triton"] = "auto"
    """auto: native on the CPU where a C++ compiler is at hand, triton on CUDA, else torch."""
    graph_sequences_max: Annotated[int, Field(ge=0, le=1024)] = 128
    """CUDA with the triton kernels: steps of up to so many decodes are recorded as CUDA graphs and replayed,
    which spares the host launching their kernels one by one; 0: none."""
    overlap_steps: bool = True
    """Plan a step while the one before it runs."""
    self_timing_s: Annotated[float, Field(ge=0, le=60)] = 1.5
    """A worker times steps of its own model for about so long when it starts, so that routers know from the
    first request on what it takes there. A few steps are run even if they take longer; 0: only these."""
    tpot_slo_s: Annotated[float, Field(ge=0, le=60)] = 0.2
    """Objective of the time per output token for requests that name none. Prompt chunks shrink so that
    running sequences keep it; 0: chunks are as large as `step_tokens_max` allows."""
    chunk_tokens_min: Annotated[int, Field(ge=1, le=65_536)] = 128
    """A step with prompts computes at least this many prompt tokens, whatever the objective."""
    swap_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory for the KV of preempted sequences; 0: they are computed again."""
    speculation: Literal["off", "ngram", "draft"] = "ngram"
    """How tokens are guessed ahead: by repeating what followed the same tokens earlier in the text, or
    by a smaller model. Never changes what is generated; turned off by itself where guesses fail."""
    speculation_tokens_max: Annotated[int, Field(ge=1, le=32)] = 8
    """Guesses per sequence and step."""
    draft_model: str = ""
    """speculation=draft: Hugging Face folder or hub id of a model with the same vocabulary."""
    draft_kv_bytes: Annotated[int, Field(gt=0)] = 128 * 2**20
    """KV pool of the draft model."""
    prepare_s: Seconds = 30.0
    """A grammar that takes longer to compile, or an adapter to load, is refused. The first one of a worker
    also pays for loading the libraries it needs."""
    adapters_max: Annotated[int, Field(ge=1, le=1024)] = 16
    """LoRA adapters held by one worker at once; the least recently used one makes room."""
    adapter_rank_max: Annotated[int, Field(ge=1, le=512)] = 64
    """Largest rank of an adapter."""


class TransferConfig(Section):
    backends: Annotated[
        tuple[BackendName, ...],
        Field(
            min_length=1,
            description="How KV bytes move between workers, most preferred first; one that cannot start is "
            f"left out, and each peer is read by the first that reaches it. {described()}.",
        ),
    ] = DEFAULT_BACKENDS
    lease_s: Seconds = 5.0
    """How long a prefill worker keeps full blocks for a decode worker that does not renew."""
    lease_slack_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    """The reader stops this much before its lease ends."""
    read_timeout_s: Seconds = 3.0
    """One read of one chunk, at most."""
    read_attempts_max: Annotated[int, Field(ge=1, le=10)] = 3
    """Attempts at one read while the lease runs."""
    reads_in_flight_max: Annotated[int, Field(ge=1, le=256)] = 8
    """Reads of one decode worker at once; further ones wait."""
    bytes_in_flight_max: Annotated[int, Field(gt=0)] = 256 * 2**20
    """Bytes that one decode worker reads at once; requests share them fairly, so that the KV of a long prompt
    does not hold up that of a short one."""
    checksums: bool = False
    """The source sends a checksum (XXH3-64) of every block, and the reader compares it with what arrived. For
    networks that are not trusted to deliver what was sent; both sides spend about 30 µs per MB."""
    receive_wait_s: Seconds = 5.0
    """How long a decode phase may wait for free blocks before it is refused."""


class StoreConfig(Section):
    host_bytes: Annotated[int, Field(ge=0)] = 1 * 2**30
    """Host memory of a host's store node, shared by the workers there; 0: no store."""
    ssd_dir: str = ""
    """Folder of the store node's files; empty: no SSD tier. One folder per node."""
    ssd_bytes: Annotated[int, Field(ge=0)] = 16 * 2**30
    """Disk space that the files may take, where `ssd_dir` is set."""
    ssd_io: Literal["auto", "direct", "buffered"] = "auto"
    """direct: past the page cache. auto: direct where the file system can."""
    ssd_threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Reads and writes in flight at the device."""
    socket: str = ""
    """Unix socket where a host's workers find its store node; empty: one in the run-time folder, made by
    `baton serve`."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """gRPC of a store node, for its peers; 0: any free one."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Prometheus metrics of a store node; 0: any free one."""
    policy: Literal["serving", "lru", "lfu", "s3fifo", "sieve"] = "serving"
    """What leaves a tier first."""
    ttl_s: Annotated[float, Field(ge=0)] = 0.0
    """Blocks not used for this long are dropped; 0: never."""
    tenant_share_max: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of each tier that one tenant may fill."""
    pinned_share_max: Annotated[float, Field(gt=0, le=0.9)] = 0.5
    """Of the host memory that loads and writes under way may hold."""
    load: Literal["auto", "always", "never"] = "auto"
    """auto: a worker brings blocks where that is predicted to be faster than computing them. always, never:
    without asking."""
    load_timeout_s: Seconds = 5.0
    """A load that takes longer becomes a computation."""
    lookup_timeout_s: Seconds = 0.05
    """For the directory to say who else has a block; without its answer there is no fetch."""
    lease_s: Seconds = 5.0
    """How long a node keeps blocks for a reading peer that does not renew."""
    replicate_bytes_s: Annotated[int, Field(ge=0)] = 256 * 2**20
    """Blocks fetched from peers stay here, as copies, up to this rate; beyond it they go after use."""
    drain_bytes: Annotated[int, Field(ge=0)] = 4 * 2**30
    """A node that leaves offers so much to its peers first."""
    checksums: bool = True
    """Blocks in host memory and from peers are verified after each copy. Those on SSD always are."""
    directory: SecretText = ""
    """redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL of the directory, also
    `--store`; empty: the control plane's."""
    directory_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "default"
    """Clusters that share a Redis and not their blocks differ in it."""
    directory_timeout_s: Seconds = 1.0
    """One call of the directory, reconnecting included; look-ups have `lookup_timeout_s`."""
    directory_entries_max: Annotated[int, Field(ge=1)] = 1_000_000
    """Blocks that the control plane's directory lists, over all nodes, at about 200 bytes each."""


class ClusterConfig(Section):
    prefill_workers: Annotated[int, Field(ge=0, le=1024)] = 1
    decode_workers: Annotated[int, Field(ge=0, le=1024)] = 1
    aggregated_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Workers that take either phase."""
    ray_address: str = ""
    """Ray cluster to join; empty: start one on this machine."""
    node_labels: dict[str, dict[str, str]] = {}
    """Role -> labels of nodes for it, by Ray's label selectors: {"decode": {"gpu": "in(H100, H200)"}}."""
    node_resources: dict[str, dict[str, float]] = {}
    """Role -> what a worker takes of Ray's resources beside threads and GPU: {"prefill": {"rdma": 1}}."""
    heartbeat_s: Seconds = 0.25
    """Between two reports of a worker to routers and directory."""
    member_lease_s: Seconds = 8.0
    """A worker silent for this long is dead: killed, and started anew. A machine short of cores can
    hold up a healthy process for seconds, and routers have long stopped using it by then."""
    member_suspect_s: Seconds = 3.0
    """A worker silent for this long, while others are heard, gets nothing new until it is heard again."""
    restart_backoff_s: Seconds = 0.5
    """Before the first restart of a replica; doubles up to `restart_backoff_max_s` while it keeps dying."""
    restart_backoff_max_s: Seconds = 30.0
    restart_stable_s: Seconds = 5.0
    """A worker that served for this long is well: when it dies, it is started anew without backoff."""
    start_timeout_s: Seconds = 600.0
    """From starting a worker to its first heartbeat."""
    router_grace_s: Seconds = 2.0
    """How long a worker keeps the sequences of a router whose session broke."""
    router_silence_s: Seconds = 8.0
    """A router that does not answer /health/live for this long hangs: killed, and started anew."""
    drain_timeout_s: Seconds = 30.0
    """How long running sequences may finish after Ctrl-C."""
    control_host: str = "127.0.0.1"
    control_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """gRPC of the control plane (directory); 0: any free one."""
    control_metrics_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Prometheus metrics of the control plane; 0: any free one."""
    record: str = ""
    """File of what was ordered, for the next life; empty: `baton serve` keeps one while it runs."""
    keep_workers: bool = False
    """`baton control --only` leaves its workers running when it is asked to end, as when it is killed:
    the next one at the same address (`cluster.control_port`) goes on with them."""
    worker_host: str = "127.0.0.1"
    """Interface the workers' gRPC and metrics servers listen on."""
    worker_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """gRPC of a worker; 0: any free one. Set it where each worker has an address of its own, as in a pod."""
    worker_metrics_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Prometheus metrics of a worker; 0: any free one."""


class AutoscaleConfig(Section):
    """How many workers there should be. Also read by `baton simulate --autoscale`, whatever the mode."""

    mode: Literal["off", "advise", "on"] = "off"
    """What the control plane does about it: nothing; log what it would order (see `baton status`); order it.
    The workers that `cluster` asks for are those it begins with."""

    prefill_min: Annotated[int, Field(ge=0, le=1024)] = 1
    """Workers of a role, those that start included: never fewer, …"""
    prefill_max: Annotated[int, Field(ge=1, le=1024)] = 8
    """… never more."""
    decode_min: Annotated[int, Field(ge=0, le=1024)] = 1
    decode_max: Annotated[int, Field(ge=1, le=1024)] = 8
    aggregated_min: Annotated[int, Field(ge=0, le=1024)] = 1
    aggregated_max: Annotated[int, Field(ge=1, le=1024)] = 8
    """Of workers that take either phase, where there are such."""
    workers_max: Annotated[int, Field(ge=0, le=3072)] = 0
    """Of all roles, and of all `models`, together; 0: the sum of their own. When it binds, all roles of a
    model are short alike, and a model gets what the others leave."""
    replica_hours_per_day: Annotated[float, Field(ge=0)] = 0.0
    """Budget over any 24 hours; 0: none. While more than half of it is left it does not bind; then what is
    left is spread over the time until the hours spent first are a day old. Minima are kept."""
    attain: Annotated[float, Field(ge=0.5, le=0.999)] = 0.95
    """Share of requests that should meet their objectives (`slo.classes`)."""
    interval_s: Annotated[float, Field(ge=1, le=300)] = 15.0
    """Between two decisions."""
    window_s: Annotated[float, Field(ge=1, le=3600)] = 120.0
    """Rates are means over so long; lengths and cached shares are averaged over half as much more."""
    caution: Annotated[float, Field(ge=0.5, le=0.99)] = 0.75
    """Which quantile of the forecast, by its own recent errors, there are workers for."""
    headroom: Annotated[float, Field(ge=1, le=10)] = 1.0
    """Times what was usual in the last hour there are workers for at all times: for jumps. 1: none."""
    patience_s: Annotated[float, Field(ge=0, le=3600)] = 300.0
    """Workers are stopped when fewer were enough for so long; longer with slow starts, or after a mistake."""
    zero_after_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Without a request for so long, once all workers serve, they are stopped, if no role has a minimum; 0:
    never. Routers hold what comes then for `router.queue_wait_s`: no zero where starts take more than four
    fifths of that."""
    season_s: Annotated[float, Field(ge=0, le=604_800)] = 0.0
    """Period after which load repeats itself, such as 86400; 0: none that is known."""
    start_s: Seconds = 60.0
    """From starting a worker until it serves, until starts were seen; so for the next two."""
    drain_s: Seconds = 20.0
    """From draining a worker until it is idle."""
    switch_s: Seconds = 20.0
    """From draining a worker until it serves in another role. No flips where that is longer than starting."""

    @property
    def may_sleep(self) -> bool:
        """There may be no worker at all, and the next request brings some back."""
        has_no_minimum = self.aggregated_min == 0 or self.prefill_min == self.decode_min == 0
        return self.mode == "on" and self.zero_after_s > 0 and has_no_minimum

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "AutoscaleConfig":
        for role in ("prefill", "decode", "aggregated"):
            least, most = getattr(self, f"{role}_min"), getattr(self, f"{role}_max")
            if least > most:
                raise ValueError(f"{role}_min: {least} is above {role}_max, {most}")
        return self


class Config(BaseSettings):
    """The whole of it."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        env_nested_delimiter="__",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    model: ModelConfig = ModelConfig()
    models: dict[Annotated[str, Field(pattern=NAME_PATTERN)], ModelEntry] = {}
    """Several models in one cluster, by the names that clients use: {"chat": {"model": {"path": "…"}}}. Each
    says what it has of its own, the sections beside it what all share. Empty: the one of `model`."""
    engine: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    store: StoreConfig = StoreConfig()
    router: RouterConfig = RouterConfig()
    slo: SloConfig = SloConfig()
    cluster: ClusterConfig = ClusterConfig()
    autoscale: AutoscaleConfig = AutoscaleConfig()
    dashboard: DashboardConfig = DashboardConfig()
    tls: TlsConfig = TlsConfig()
    access: AccessConfig = AccessConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @model_validator(mode="after")
    def _models_are_whole(self) -> "Config":
        for name in self.models:
            if not self.of_model(name).model.path:
                raise ValueError(
                    f"models.{name}.model.path: name a Hugging Face folder, hub id, or GGUF file"
                )
        return self

    def of_model(self, name: str) -> "Config":
        """The configuration of one of `models`, as if there were no others. Raises ValueError."""
        entry = self.models[name]
        sections: dict[str, Any] = {"models": {}}
        for section in OWN_SECTIONS:
            try:
                own = entry.own(section)
            except ValueError as error:
                raise ValueError(f"models.{name}.{error}") from None
            own |= {"name": name} if section == "model" else {}
            sections[section] = with_own(getattr(self, section), own, where=f"models.{name}.{section}")
        return self.model_copy(update=sections)


def sections() -> dict[str, type[Section]]:
    """The sections of settings, by name; `models` is made of them."""
    kinds = {name: info.annotation for name, info in Config.model_fields.items()}
    return {n: kind for n, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}
