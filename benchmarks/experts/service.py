"""Expert ranks beside a process that holds all experts, on the same two cores."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from baton.config.experts import ExpertsConfig
from baton.core.experts import ExpertMapUpdate, ExpertRankRef
from benchmarks.experts.processes import MeasuredProcess, map_of, run_rank, run_worker
from benchmarks.parallel.cores import cores_to_use
from engine.experts.caller import ExpertCaller, ExpertReport

HIDDEN = 1024


class MoeSizes(NamedTuple):
    layers: int
    experts: int
    chosen: int
    inner: int


SERVICE = MoeSizes(layers=8, experts=16, chosen=4, inner=1024)
SKEW = MoeSizes(layers=2, experts=64, chosen=4, inner=256)
PROMPT_TOKENS, DECODE_BATCH, CONTEXT_TOKENS = 512, 32, 256
THROUGHPUT_MIN = 0.8
BESIDE_IDLE_MIN = 0.95
IDLE_WORKERS = 3
_MADE = "made"


class ServiceRun(msgspec.Struct, frozen=True):
    """Tokens per second of both cores together."""

    prefill: float
    decode: float


class ServiceReport(msgspec.Struct, frozen=True):
    whole: tuple[ServiceRun, ...]
    """One process with two threads that holds all experts, by round."""
    divided: tuple[ServiceRun, ...]
    """Two workers and two expert ranks, one of each on a core."""
    combine_bytes_per_s: float
    """Rows and results that one caller moved per second, over the time of a dispatch without compute."""
    copy_bytes_per_s: float
    """A memcpy of as many bytes as one dispatch moves."""
    beside_idle: float
    """Decode speed of one worker while three others are connected and do nothing, over its speed alone."""

    def ratio(self, name: str) -> float:
        """Median of the rounds' ratios, divided over whole. name: prefill or decode."""
        pairs = zip(self.divided, self.whole, strict=True)
        return median(getattr(one, name) / getattr(other, name) for one, other in pairs)

    @property
    def is_within_bounds(self) -> bool:
        fast = min(self.ratio("prefill"), self.ratio("decode")) >= THROUGHPUT_MIN
        return fast and self.beside_idle >= BESIDE_IDLE_MIN


def make_moe_model(folder: Path, sizes: MoeSizes = SERVICE) -> Path:
    """Make the bf16 model of random weights unless it exists, and return its folder."""
    if (folder / _MADE).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    fields: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": sizes.inner,
        "moe_intermediate_size": sizes.inner,
        "num_experts": sizes.experts,
        "num_experts_per_tok": sizes.chosen,
        "norm_topk_prob": True,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    config = Qwen3MoeConfig(**fields)
    model: Any = Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / _MADE).touch()
    return folder


class MeasuredRanks:
    """Two expert ranks, one per core."""

    def __init__(self, folder: Path, rows: str) -> None:
        cores = cores_to_use()
        self.children = [
            MeasuredProcess(run_rank, str(folder), f"rank-{n}", (core,), rows) for n, core in enumerate(cores)
        ]
        greetings = [child.receive() for child in self.children]
        self.refs: list[ExpertRankRef] = [greeting[0] for greeting in greetings]
        self.sizes: tuple[int, int] = greetings[0][1:]
        self.held: list[set[int]] = [set(), set()]
        self.epoch = 0

    def hold(self, held: list[set[int]]) -> ExpertMapUpdate:
        """Load what each rank shall hold besides what it has; returns the map. `drop_rest` gives up the
        rest."""
        for child, own, before in zip(self.children, held, self.held, strict=True):
            child.send("load", sorted(own - before))
        for child in self.children:
            child.receive()
        self._extra = [before - own for own, before in zip(held, self.held, strict=True)]
        self.held = held
        self.epoch += 1
        return map_of(self.refs, [sorted(own) for own in held], self.sizes, self.epoch)

    def drop_rest(self) -> None:
        for child, extra in zip(self.children, self._extra, strict=True):
            child.ask("drop", sorted(extra))

    def halves(self) -> list[set[int]]:
        """The lower half of each layer's experts on one rank, the upper one on the other."""
        layers, experts = self.sizes
        lower = {layer * experts + e for layer in range(layers) for e in range(experts // 2)}
        return [lower, set(range(layers * experts)) - lower]

    def end(self) -> None:
        for child in self.children:
            child.end()


def measure_service(
    folder: Path, *, rounds: int, seconds: float, rows: str, progress: Callable[[str], None]
) -> ServiceReport:
    """Both kinds in turn, `rounds` times, each for `seconds` of prefill and of decode."""
    cores = cores_to_use()
    progress("expert ranks and workers load the model")
    ranks = MeasuredRanks(folder, rows)
    workers: list[MeasuredProcess] = []
    try:
        update = ranks.hold(ranks.halves())
        for number, core in enumerate(cores):
            workers.append(
                MeasuredProcess(run_worker, str(folder), f"worker-{number}", (core,), update, rows)
            )
        whole = MeasuredProcess(run_worker, str(folder), "whole", cores, None, rows)
        for child in (*workers, whole):
            child.receive()
        found: dict[str, list[ServiceRun]] = {"whole": [], "divided": []}
        for number in range(rounds):
            for name, children in (("whole", [whole]), ("divided", workers)):
                run = _run(children, seconds)
                found[name].append(run)
                progress(
                    f"round {number + 1} of {rounds}, {name}: prefill {run.prefill:.0f} tokens/s, decode "
                    f"{run.decode:.0f} tokens/s"
                )
        for child in (*workers, whole):
            child.end()
        moved, copied = _copies(ranks, rows)
        progress("one worker decodes alone, beside idle ones, and alone again")
        beside = _beside_idle(folder, update, rows, seconds)
        return ServiceReport(tuple(found["whole"]), tuple(found["divided"]), moved, copied, beside)
    finally:
        for child in workers:
            child.end()
        ranks.end()


def _run(children: list[MeasuredProcess], seconds: float) -> ServiceRun:
    share = DECODE_BATCH // len(children)
    requests = (("prefill", PROMPT_TOKENS, seconds), ("decode", share, CONTEXT_TOKENS, seconds))
    rates: list[float] = []
    for request in requests:
        for child in children:
            child.send(*request)
        rates.append(sum(tokens / elapsed_s for tokens, elapsed_s in (child.receive() for child in children)))
    return ServiceRun(*rates)


def _beside_idle(folder: Path, update: ExpertMapUpdate, rows: str, seconds: float) -> float:
    cores, request = cores_to_use(), ("decode", DECODE_BATCH // 2, CONTEXT_TOKENS, seconds)
    children: list[MeasuredProcess] = []

    def start(number: int) -> MeasuredProcess:
        name, core = f"idle-{number}", cores[number % len(cores)]
        child = MeasuredProcess(run_worker, str(folder), name, (core,), update, rows)
        children.append(child)
        return child

    def speed() -> float:
        tokens, elapsed_s = children[0].ask(*request)
        return tokens / elapsed_s

    try:
        start(0).receive()
        before = speed()
        for child in [start(1 + number) for number in range(IDLE_WORKERS)]:
            child.receive()
        beside = speed()
        for child in children[1:]:
            child.end()
        return 2 * beside / (before + speed())
    finally:
        for child in children:
            child.end()


def _copies(ranks: MeasuredRanks, rows: str) -> tuple[float, float]:
    """Bytes per second that one caller moves, without the time in which ranks compute, and of a memcpy."""
    layers, experts = ranks.sizes
    reports: list[ExpertReport] = []
    caller = ExpertCaller(
        ExpertsConfig(rows=rows),  # type: ignore[arg-type]
        layer_count=layers,
        expert_count=experts,
        hidden=HIDDEN,
        dtype=torch.bfloat16,
        name="copies",
        report=reports.append,
    )
    try:
        caller.use(map_of(ranks.refs, [sorted(own) for own in ranks.held], ranks.sizes, ranks.epoch))
        assert caller.wait_complete(30.0)
        x = torch.randn((PROMPT_TOKENS, HIDDEN), dtype=torch.bfloat16)
        chosen = torch.stack([torch.randperm(experts)[: SERVICE.chosen] for _ in range(PROMPT_TOKENS)])
        weights = torch.ones((PROMPT_TOKENS, SERVICE.chosen))
        rates: list[float] = []
        for number in range(20):
            before = [child.ask("stats")[1] for child in ranks.children]
            stats, begun_s = caller.stats(), time.perf_counter()
            caller.finish(caller.begin(number % layers, x, chosen), weights)
            elapsed_s, after = time.perf_counter() - begun_s, caller.stats()
            busy_s = max(
                child.ask("stats")[1] - was for child, was in zip(ranks.children, before, strict=True)
            )
            moved = after.row_bytes + after.result_bytes - stats.row_bytes - stats.result_bytes
            rates.append(moved / max(1e-9, elapsed_s - busy_s))
        return median(rates), _memcpy_rate(PROMPT_TOKENS * (2 * 2 + SERVICE.chosen * 4) * HIDDEN)
    finally:
        caller.close()


def _memcpy_rate(byte_count: int) -> float:
    source, target = np.ones(byte_count, dtype=np.uint8), np.empty(byte_count, dtype=np.uint8)
    times: list[float] = []
    for _ in range(20):
        begun_s = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun_s)
    return byte_count / median(times)
