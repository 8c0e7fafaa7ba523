"""Every setting, declared once. Command line, environment and documentation are derived from here.

A value is what was *asked for*: frozen, bounded, unknown keys refused. What follows from it
(`baton.core.geometry`) and what is measured (`WorkerHello`, `LoadReport`) are other types.

Environment: `BATON_` + section + `__` + field, for example BATON_TRANSFER__LEASE_S=5.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton.config.autoscale import AutoscaleConfig
from baton.config.base import EvictionPolicyName, OffloadText, Seconds, SecretText, Section, ShapeText
from baton.config.experts import ExpertsConfig
from baton.config.models import NAME_PATTERN, OWN_SECTIONS, ModelEntry, with_own
from baton.config.operators import AccessConfig, DashboardConfig, TelemetryConfig, TlsConfig
from baton.config.router import RouterConfig, SloConfig
from baton.core.errors import SetupError
from baton.core.policies import DEFAULT_EVICTION, EVICTION_POLICIES, choices_text
from baton.core.shape import CountedShape, Shape
from baton.core.transfer_backends import DEFAULT_BACKENDS, BackendName, described


class ModelConfig(Section):
    path: str = ""
    """Hugging Face folder, hub id, or GGUF file."""
    name: str = ""
    """Name that clients use. Empty: the last part of the folder's name or hub id."""
    revision: str = "main"
    """Revision on the hub. A local folder ignores it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV. auto: what the checkpoint's config.json says."""
    device: str = "cpu"
    """Torch device, for example cpu, cuda or cuda:1."""
    context_tokens_max: Annotated[int, Field(ge=0)] = 0
    """Largest number of prompt and generated tokens of one sequence. 0: what the model's config.json says."""
    quantization: Literal["none", "int8", "int4", "w8a8", "fp8"] = "none"
    """Format that weights are quantised to while they are loaded. w8a8: int8, and activations are rounded to
    int8 too, token by token (CPU only). A checkpoint that is quantised already (GPTQ, AWQ,
    compressed-tensors, MXFP4, GGUF) is recognised, and needs none here."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Data type of the KV cache. auto: the same as `dtype`. int8 and fp8 keep one scale per head and token.
    """
    offload: OffloadText = "0"
    """Layers whose weights stay off the device and are streamed to it while the layers before them compute: a
    number, all, or auto, which streams as many as memory demands. CUDA: they are in page-locked host memory;
    CPUs: in a file. Each rank streams those of its part. The tokens are the same."""
    offload_folder: str = ""
    """Folder for the file of streamed layers, on a local disk with room for them. Empty: `offload` in
    the cache folder: $BATON_CACHE_DIR, else ~/.cache/baton."""
    weights_bytes_max: Annotated[int, Field(ge=0)] = 0
    """Memory for the weights of one rank, in bytes; offload=auto streams what exceeds it. 0: as much as the
    device, limits of the process and its cgroup, or the machine leave."""
    reasoning_parser: str = ""
    """Parser that separates reasoning from the answer. Empty: chosen by the model's family. none: no parser.
    """
    tool_parser: str = ""
    """Parser that finds tool calls in the text. Empty: chosen by the model's family. none: no parser."""
    generation_config: str = "auto"
    """Where the sampling of requests that leave it out comes from. auto: the checkpoint's
    generation_config.json, or a GGUF file's metadata. none: only OpenAI's defaults. Otherwise a folder with a
    generation_config.json."""
    generation_overrides: dict[str, float] = {}
    """Sampling defaults that replace those of `generation_config`: temperature, top_p, top_k, min_p,
    repetition_penalty, max_new_tokens. A request's own fields come before both."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that are served from the start, each as NAME=FOLDER_OR_HUB_ID."""


GRAMMAR_TIMES = 2.1
"""How many times `engine.prepare_s` a sequence with a grammar has: once until its turn at the compiler comes,
and once from then on. The compiler's own limits come a little before."""
STEP_TOKENS, DEVICE_STEP_TOKENS = 576, 2048
"""`engine.step_tokens_max` on CPUs and on GPUs, where it is not set. 576 are 512 tokens of prompts and the 64
sequences that may decode beside them. For so few the host of a GPU launches as many kernels as for 2048, and
takes about as long for that as the GPU for the step."""
PREPARE_S_MAX = 10.0
"""Longest time that a worker takes by itself to make a sequence ready. Whatever takes longer is stuck, or in
a queue that is shorter elsewhere."""


class EngineConfig(Section):
    block_tokens: Annotated[int, Field(ge=1, le=512)] = 32
    """Token positions in one KV block, the same in the whole cluster."""
    kv_bytes: Annotated[int, Field(ge=0)] = 0
    """Size of one worker's KV pool in bytes. 0: on GPUs that Ray reserves what the weights and 2 GiB leave of
    the worker's share of 90 % of the memory; elsewhere room for 1.25 sequences of the model's whole context,
    at least 128 MiB, and at most the worker's share of half the memory of the machine, its control group or
    the GPU."""
    step_tokens_max: Annotated[int, Field(ge=1, le=65_536)] = STEP_TOKENS
    """Largest number of tokens in one engine step, prompt chunks and decodes together, over all ranks. Unless
    it is set, workers on GPUs take 2048."""
    step_timeout_s: Seconds = 60.0
    """Longest time for one engine step. A worker that exceeds it is taken to have a hanging device, ends, and
    is restarted."""
    batch_sequences_max: Annotated[int, Field(ge=1, le=4096)] = 64
    """Largest number of sequences in one step."""
    waiting_sequences_max: Annotated[int, Field(ge=1)] = 256
    """Largest number of sequences that a worker has accepted and not started. One more is refused."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Compute threads of one rank of a worker. 0: its fair share of the cores."""
    shape: ShapeText = "1"
    """Ranks of one worker, each a process on a device or cores of its own. tp2: two tensor ranks divide every
    layer. pp2: two stages divide the layers. cp2: two context ranks divide the tokens of a step. tp2pp2:
    ranks of both kinds. 1: one process. See also `cluster.shapes`."""
    rank_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Longest time that one rank waits for another within a step. A rank that does not answer, or has died,
    ends its worker, which is started anew as a whole."""
    collectives: Literal["auto", "shared_memory", "torch"] = "auto"
    """What carries tensors between the ranks of a worker. shared_memory: of one host, on CPUs. torch:
    torch.distributed, NCCL on CUDA and gloo on CPUs, with a KV pool that only its own rank reaches. auto:
    shared_memory on CPUs, torch elsewhere."""
    kernels: Literal["auto", "torch", "native", "triton"] = "auto"
    """Kernel implementation. auto: native on a CPU with a C++ compiler at hand, triton on CUDA, torch
    elsewhere."""
    graph_sequences_max: Annotated[int, Field(ge=0, le=1024)] = 128
    """Largest decode batch that is recorded and replayed, which saves calling its kernels one by one: as a
    CUDA graph with the triton kernels, as a list of calls with the native ones, which also replay steps with
    prompts. 0: nothing is recorded."""
    overlap_steps: bool = True
    """Whether the next step is planned while the current one runs."""
    self_timing_s: Annotated[float, Field(ge=0, le=60)] = 1.2
    """Seconds for which a worker times steps of its own model when it starts, so that routers can predict it
    from the first request on. A few steps always run, even if they take longer. 0: only those. A worker that
    starts again uses what it measured before, if the first few steps agree with it."""
    tpot_slo_s: Annotated[float, Field(ge=0, le=60)] = 0.2
    """Time per output token that requests without an objective of their own should get. Prompt chunks shrink
    so that running sequences keep it, and where those miss it by themselves, prompts take as long as they do.
    0: chunks are as large as `step_tokens_max` allows."""
    chunk_tokens_min: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Least number of prompt tokens in a step with prompts, whatever the objective."""
    swap_bytes: Annotated[int, Field(ge=0)] = 0
    """Host memory for the KV of preempted sequences. 0: it is recomputed."""
    speculation: Literal["off", "ngram", "draft"] = "ngram"
    """Source of draft tokens: n-grams that occurred earlier in the text, or a smaller model. Speculation
    never changes what is generated, and pauses where drafts are rejected."""
    speculation_tokens_max: Annotated[int, Field(ge=1, le=32)] = 8
    """Draft tokens per sequence and step."""
    draft_model: str = ""
    """Hugging Face folder or hub id of a model with the same vocabulary, for speculation=draft."""
    draft_kv_bytes: Annotated[int, Field(gt=0)] = 128 * 2**20
    """Size of the draft model's KV pool in bytes."""
    compile_s: Seconds = 10.0
    """Processor time that one grammar may take to compile. A request whose grammar needs more is refused with
    400. The grammars of other requests wait for it at most this long for each tenant."""
    prepare_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Longest time to wait for a loaded adapter, or for a grammar to be compiled: once while those before it
    are, and once while it is. A sequence that waits longer goes to another worker, so 2.1 times that time
    must be shorter than `router.queue_wait_s` and `router.request_timeout_s`. 0: a third of the shorter one,
    and at most 10 s. A worker's first one also loads the libraries that it needs."""
    adapters_max: Annotated[int, Field(ge=1, le=1024)] = 16
    """LoRA adapters that one worker holds at once. The least recently used one makes room."""
    adapter_rank_max: Annotated[int, Field(ge=1, le=512)] = 64
    """Largest rank of a LoRA adapter."""


class TransferConfig(Section):
    backends: Annotated[
        tuple[BackendName, ...],
        Field(
            min_length=1,
            description="Transfer backends, most preferred first. One that cannot start is left out, and "
            f"each peer is read by the first that reaches it. {described()}",
        ),
    ] = DEFAULT_BACKENDS
    lease_s: Seconds = 5.0
    """Seconds for which a prefill worker keeps full blocks for a decode worker that does not renew its lease.
    """
    lease_slack_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    """Seconds before the end of its lease at which a KV reader stops."""
    read_timeout_s: Seconds = 3.0
    """Longest time for one read of one chunk."""
    read_attempts_max: Annotated[int, Field(ge=1, le=10)] = 3
    """Attempts at one read while the lease runs."""
    reads_in_flight_max: Annotated[int, Field(ge=1, le=256)] = 8
    """Reads that one decode worker has in flight. Further ones wait."""
    bytes_in_flight_max: Annotated[int, Field(gt=0)] = 256 * 2**20
    """Bytes that one decode worker has in flight. Requests share them fairly, so that the KV of a long prompt
    does not delay that of a short one."""
    checksums: bool = False
    """Whether the KV owner sends a checksum (XXH3-64) of every block and the reader compares it. It is meant
    for networks that may corrupt data, and costs both sides about 30 µs per MB."""
    receive_wait_s: Seconds = 5.0
    """Seconds that a decode phase may wait for free blocks before it is refused."""


class StoreConfig(Section):
    host_bytes: Annotated[int, Field(ge=0)] = 1 * 2**30
    """Host memory of a store node, shared by the host's workers. 0: no store."""
    ssd_dir: str = ""
    """Folder of a store node's SSD files, one folder per node. Empty: no SSD tier."""
    ssd_bytes: Annotated[int, Field(ge=0)] = 16 * 2**30
    """Disk space that the SSD tier may use where `ssd_dir` is set."""
    ssd_io: Literal["auto", "direct", "buffered"] = "auto"
    """File access. direct: bypass the page cache. auto: direct where the file system supports it."""
    ssd_threads: Annotated[int, Field(ge=1, le=64)] = 4
    """Reads and writes in flight at the device."""
    socket: str = ""
    """Unix socket of a host's store node. Empty: `baton serve` makes one in its run-time folder."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """gRPC port of a store node, for other store nodes. 0: any free port."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of a store node for Prometheus metrics. 0: any free port."""
    policy: Annotated[
        EvictionPolicyName,
        Field(description=f"Eviction: what leaves a tier first. {choices_text(EVICTION_POLICIES)}."),
    ] = DEFAULT_EVICTION
    ttl_s: Annotated[float, Field(ge=0)] = 0.0
    """Blocks that were not used for this long are dropped. 0: never."""
    tenant_share_max: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Largest part of each tier that one tenant may fill."""
    pinned_share_max: Annotated[float, Field(gt=0, le=0.9)] = 0.5
    """Largest part of host memory that loads and writes in progress may hold."""
    load: Literal["auto", "always", "never"] = "auto"
    """When a worker loads blocks from the store. auto: where that is predicted to be faster than computing
    them. always and never: without a prediction."""
    load_timeout_s: Seconds = 5.0
    """Longest time for a load. After it the worker computes the blocks instead."""
    lookup_timeout_s: Seconds = 0.05
    """Longest time for the directory to say which other nodes have a block. Without its answer nothing is
    fetched."""
    lease_s: Seconds = 5.0
    """Seconds for which a node keeps blocks for a reading peer that does not renew its lease."""
    replicate_bytes_s: Annotated[int, Field(ge=0)] = 256 * 2**20
    """Rate up to which blocks fetched from peers are kept here as copies. Beyond it they are dropped after
    use."""
    drain_bytes: Annotated[int, Field(ge=0)] = 4 * 2**30
    """Bytes that a node offers to its peers before it leaves."""
    checksums: bool = True
    """Whether blocks in host memory and from peers are verified after each copy. Blocks on SSD always are."""
    directory: SecretText = ""
    """URL of the store's directory (redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://),
    also `--store`. Empty: the control plane's."""
    directory_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "default"
    """Name that keeps clusters apart which share a Redis and not their blocks."""
    directory_timeout_s: Seconds = 1.0
    """Longest time for one call of the directory, reconnecting included. Look-ups have `lookup_timeout_s`."""
    directory_entries_max: Annotated[int, Field(ge=1)] = 1_000_000
    """Blocks that the control plane's directory lists over all nodes, at about 200 bytes each."""


ROLES = ("prefill", "decode", "aggregated")


class ClusterConfig(Section):
    prefill_workers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Number of prefill workers, with their shape where it is not `engine.shape`: 2, or 2xtp2 for two workers
    of two tensor ranks each. The same holds for the next two."""
    decode_workers: Annotated[int, Field(ge=0, le=1024)] = 1
    aggregated_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Workers that run both phases of a request."""
    ray_address: str = ""
    """Address of the Ray cluster to join. Empty: start one on this machine."""
    node_labels: dict[str, dict[str, str]] = {}
    """Labels of the nodes for each role, as Ray's label selectors: {"decode": {"gpu": "in(H100, H200)"}}.
    Those of "experts" are for expert ranks apart from the workers, which go by their pool's role without."""
    shapes: dict[str, ShapeText] = {}
    """Shapes of the workers of each role, where they differ from `engine.shape`: {"prefill": "tp2"}. A worker
    keeps its shape when it switches its role, until it is restarted."""
    node_resources: dict[str, dict[str, float]] = {}
    """Ray resources that a worker of each role takes beside threads and GPU: {"prefill": {"rdma": 1}}."""
    heartbeat_s: Seconds = 0.25
    """Seconds between two of a worker's reports to routers and directory."""
    member_lease_s: Seconds = 8.0
    """A worker that is silent for this long is dead: it is killed and restarted. The value is generous, since
    a machine short of cores can hold up a healthy process for seconds, and routers stop using it long before.
    """
    member_suspect_s: Seconds = 3.0
    """A worker that is silent for this long, while others report, gets no new requests until it reports
    again."""
    restart_backoff_s: Seconds = 0.5
    """Seconds before the first restart of a replica. They double up to `restart_backoff_max_s` while it keeps
    failing."""
    restart_backoff_max_s: Seconds = 30.0
    restart_stable_s: Seconds = 5.0
    """A worker that served for this long is healthy: it is restarted without backoff when it dies."""
    start_timeout_s: Seconds = 600.0
    """Longest time from starting a worker to its first heartbeat."""
    router_grace_s: Seconds = 2.0
    """Seconds for which a worker keeps the sequences of a router whose session broke."""
    router_silence_s: Seconds = 8.0
    """A router that does not answer /health/live for this long hangs: it is killed and restarted."""
    drain_timeout_s: Seconds = 30.0
    """Seconds that running sequences have to finish after Ctrl-C."""
    control_host: str = "127.0.0.1"
    control_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """gRPC port of the control plane. 0: any free port."""
    control_metrics_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of the control plane for Prometheus metrics. 0: any free port."""
    record: str = ""
    """File in which the control plane keeps its orders for its next start. Empty: `baton serve` keeps one
    while it runs."""
    keep_workers: bool = False
    """Whether `baton control --only` leaves its workers running when it ends, as it does when it is killed.
    The next one at the same address (`cluster.control_port`) goes on with them."""
    worker_host: str = "127.0.0.1"
    """Interface that the gRPC and metrics servers of workers and store nodes listen on, and routers for one
    another. It is the cluster's own: clients have no business there."""
    worker_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """gRPC port of a worker. 0: any free port. Set it where each worker has an address of its own, as in a
    pod."""
    worker_metrics_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of a worker for Prometheus metrics. 0: any free port."""

    @model_validator(mode="before")
    @classmethod
    def _counts_may_name_shapes(cls, values: Any) -> Any:
        """Turn `prefill_workers: 2xtp2` into a number and a shape."""
        if not isinstance(values, dict):
            return values
        given: dict[str, Any] = dict(values)  # pyright: ignore[reportUnknownArgumentType] - from outside
        shapes: dict[str, str] = {}
        for role in ROLES:
            text = given.get(f"{role}_workers")
            if not isinstance(text, str) or _is_number(text):
                continue
            try:
                counted = CountedShape.parse(text)
            except SetupError as error:
                raise ValueError(f"{role}_workers: {error}") from None
            given[f"{role}_workers"] = counted.count
            if counted.shape is not None:
                shapes[role] = str(counted.shape)
        if shapes:
            given["shapes"] = {**(given.get("shapes") or {}), **shapes}
        return given

    @field_validator("shapes", mode="before")
    @classmethod
    def _shapes_have_roles(cls, shapes: Any) -> Any:
        if isinstance(shapes, str):
            raise PydanticCustomError(
                "shapes",
                "should name roles, as in cluster.shapes.prefill=tp2 or {example} (engine.shape is for "
                "all roles)",
                {"example": '{"prefill": "tp2"}'},
            )
        return shapes

    @field_validator("shapes")
    @classmethod
    def _shapes_are_of_roles(cls, shapes: dict[str, str]) -> dict[str, str]:
        if strange := sorted(shapes.keys() - set(ROLES)):
            raise ValueError(f"{', '.join(strange)}: no such role; roles are {', '.join(ROLES)}")
        return shapes


class Config(BaseSettings):
    """The whole configuration of a cluster."""

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
    entry says what differs for its model; the sections beside it hold for all. Empty: the one of `model`."""
    engine: EngineConfig = EngineConfig()
    experts: ExpertsConfig = ExpertsConfig()
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

    @model_validator(mode="before")
    @classmethod
    def _gpus_take_longer_steps(cls, values: Any) -> Any:
        """Set `engine.step_tokens_max` for a GPU, if nobody did."""
        if not isinstance(values, dict):
            return values
        given: dict[str, Any] = dict(values)  # pyright: ignore[reportUnknownArgumentType] - from outside
        model, engine = given.get("model"), given.get("engine", {})
        if not isinstance(model, dict) or not isinstance(engine, dict) or "step_tokens_max" in engine:
            return given
        if str(model.get("device", "")).startswith("cuda"):  # pyright: ignore[reportUnknownArgumentType]
            given["engine"] = {**engine, "step_tokens_max": DEVICE_STEP_TOKENS}
        return given

    @model_validator(mode="after")
    def _models_are_whole(self) -> "Config":
        for name in self.models:
            if not self.of_model(name).model.path:
                raise ValueError(
                    f"models.{name}.model.path: name a Hugging Face folder, hub id, or GGUF file"
                )
        return self

    @model_validator(mode="after")
    def _second_worker_has_time(self) -> "Config":
        self._check_prepare_s("")
        for name in self.models:
            self.of_model(name)._check_prepare_s(f"models.{name}.")
        return self

    def _check_prepare_s(self, where: str) -> None:
        for name in ("queue_wait_s", "request_timeout_s"):
            limit_s, prepare_s = getattr(self.router, name), self.engine.prepare_s
            if GRAMMAR_TIMES * prepare_s >= limit_s:
                raise ValueError(
                    f"{where}engine.prepare_s: {prepare_s:g}, which a grammar may take {GRAMMAR_TIMES:g} "
                    f"times, must be below router.{name}, {limit_s:g}: when a worker gives a request up "
                    "after that time, none is left to try a second worker; leave it out, or take "
                    f"{limit_s / 3:g} or less"
                )

    def settled(self) -> "Config":
        """Return the configuration with numbers for what is worked out from other sections."""
        if self.engine.prepare_s > 0:
            return self
        limit_s = min(self.router.queue_wait_s, self.router.request_timeout_s)
        engine = self.engine.model_copy(update={"prepare_s": min(PREPARE_S_MAX, limit_s / 3)})
        return self.model_copy(update={"engine": engine})

    def shape_of(self, role: str) -> Shape:
        """Return the shape in which workers of a role are started."""
        return Shape.parse(self.cluster.shapes.get(role, self.engine.shape))

    def _own_step_tokens(self, device: str) -> dict[str, int]:
        """The setting of a model that is on another kind of device, unless all have one that was chosen."""
        usual = {True: DEVICE_STEP_TOKENS, False: STEP_TOKENS}
        kinds = [one.startswith("cuda") for one in (self.model.device, device)]
        is_chosen = self.engine.step_tokens_max != usual[kinds[0]]
        return {} if is_chosen or kinds[0] == kinds[1] else {"step_tokens_max": usual[kinds[1]]}

    def of_role(self, role: str) -> "Config":
        """The configuration of one role's workers: `engine.shape` is theirs."""
        engine = self.engine.model_copy(update={"shape": str(self.shape_of(role))})
        return self.model_copy(update={"engine": engine})

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
            if section == "engine" and "step_tokens_max" not in own:
                own |= self._own_step_tokens(str(entry.own("model").get("device", self.model.device)))
            sections[section] = with_own(getattr(self, section), own, where=f"models.{name}.{section}")
        return self.model_copy(update=sections)


def _is_number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def sections() -> dict[str, type[Section]]:
    """Return the sections of settings by name. The entries of `models` are made of them."""
    kinds = {name: info.annotation for name, info in Config.model_fields.items()}
    return {n: kind for n, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}
