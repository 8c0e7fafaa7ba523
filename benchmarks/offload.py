"""Steps of a model with and without streamed layers, beside the least time that streaming allows.

`python -m benchmarks.offload MODEL --layers 0,12,all`: for each setting the model is loaded in a process of
its own and times its steps, as a worker does when it starts.
"""

import argparse
import resource
import subprocess
import sys
from collections import defaultdict
from statistics import median

import msgspec

from baton.config import EngineConfig, ModelConfig
from baton.core.messages import INFO_NOTE
from engine.execution.executor import Executor
from engine.execution.executor_timing import time_executor
from engine.scheduling.step_time import StepWork


class OffloadTimes(msgspec.Struct, frozen=True):
    offload: str
    floor_ms: float
    peak_mib: float
    """Largest resident memory of the process."""
    steps_ms: dict[str, float]
    """Median time by kind of step."""
    notes: tuple[str, ...]


def measure(model: ModelConfig, threads: int, budget_s: float) -> OffloadTimes:
    engine = EngineConfig(threads=threads, kv_bytes=64 * 2**20, batch_sequences_max=32)
    executor = Executor.load(model, engine)
    steps: dict[str, list[float]] = defaultdict(list)
    for work, elapsed_s in time_executor(executor, budget_s, uses_cache=False):
        steps[_kind(work)].append(elapsed_s * 1e3)
    executor.close()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    medians = {kind: median(times) for kind, times in steps.items()}
    notes = tuple(note for note in executor.notes if note.startswith(INFO_NOTE + "offload"))
    return OffloadTimes(model.offload, executor.floor_s * 1e3, peak_mib, medians, notes)


def _kind(work: StepWork) -> str:
    if work.prompt_tokens:
        return f"prompt of {work.prompt_tokens}"
    return f"{work.decodes} decodes at {work.context_tokens // max(1, work.decodes)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--layers", default="0,12,all", help="values of model.offload, separated by commas")
    parser.add_argument("--folder", default="", help="model.offload_folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    settings = asked.layers.split(",")
    if len(settings) > 1:  # the largest memory is a process's
        own = [f"--folder={asked.folder}", f"--threads={asked.threads}", f"--seconds={asked.seconds}"]
        for offload in settings:
            command = [sys.executable, "-m", "benchmarks.offload", asked.model, *own, f"--layers={offload}"]
            subprocess.run(command, check=False)
        return
    model = ModelConfig(path=asked.model, offload=settings[0], offload_folder=asked.folder)
    found = measure(model, asked.threads, asked.seconds)
    sys.stdout.write(
        f"offload={found.offload}: floor {found.floor_ms:.0f} ms, peak {found.peak_mib:.0f} MiB\n"
    )
    for note in (line.removeprefix(INFO_NOTE) for line in found.notes):
        sys.stdout.write(f"  {note}\n")
    for kind, step_ms in found.steps_ms.items():
        sys.stdout.write(f"  {kind}: {step_ms:.1f} ms\n")


if __name__ == "__main__":
    main()
