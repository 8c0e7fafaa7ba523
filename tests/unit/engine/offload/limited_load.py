"""Load a model and answer under a limit of memory: `python -m … FOLDER SHAPE OFFLOAD MIB LAYERS_FOLDER`.

The limit is what this process may take beyond what it has when its libraries are loaded. Followers inherit
it. 0: none.
"""

import os
import resource
import sys
from pathlib import Path

import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.sampling import SamplingParams
from engine.execution.executor import Executor
from engine.execution.follower import Follower
from engine.native.library import library
from tests.unit.engine.driver import Driver


def main(folder: str, shape: str, offload: str, limit_mib: str, layers_folder: str) -> None:
    assert Follower
    torch.set_num_threads(1)
    library()
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmData"))
    limit = int(line.split()[1]) * 1024 + int(limit_mib) * 2**20
    if limit_mib != "0":
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    model = ModelConfig(path=folder, offload=offload, offload_folder=layers_folder)
    engine = EngineConfig(kv_bytes=2**22, block_tokens=16, threads=1, shape=shape, step_tokens_max=64)
    try:
        executor = Executor.load(model, engine)
    except SetupError as error:
        sys.stdout.write(f"refused: {error}\n")
        return
    driver = Driver(executor)
    running = driver.start(range(40), SamplingParams(max_tokens=8))
    driver.finish(running, chunk=32)
    sys.stdout.write(f"tokens: {running.generated}\n")
    executor.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
