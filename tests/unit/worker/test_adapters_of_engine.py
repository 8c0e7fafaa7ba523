"""Adapters come and go in a real engine while others are in use."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.config import EngineConfig, ModelConfig
from baton.core.ids import BlockHash, SequenceId
from baton.core.messages import AdapterRef, Phase, RefusalReason, StartSequence
from baton.core.sampling import SamplingParams
from engine.execution.executor import Executor
from engine.model_files.adapter_files import digest_adapter
from tests.adapters import make_adapter
from tests.models import make_model
from tests.unit.engine.driver import Driver
from worker.engine_thread import EngineThread
from worker.preparation import NotPrepared
from worker.preparers import AdapterPreparer, EngineAdapters

PARAMS = SamplingParams(max_tokens=6)
PROMPT = list(range(5, 30))


class Worker:
    def __init__(self, executor: Executor, folder: Path, base: Path) -> None:
        self.executor, self.engine, self.threads = executor, EngineThread(), ThreadPoolExecutor(1)
        self.in_use: set[str] = set()
        self.adapters = AdapterPreparer(
            EngineAdapters(executor, self.engine), self.threads, count_max=2, in_use=lambda: self.in_use
        )
        self.refs = []
        for number in range(3):
            path = make_adapter(base, folder / f"a{number}", seed=number, strength=0.5)
            self.refs.append(AdapterRef(f"a{number}", str(path), digest_adapter(path)))

    async def prepare(self, ref: AdapterRef) -> None:
        start = StartSequence(
            SequenceId("s"), 1, Phase.AGGREGATED, (1,), 1, PARAMS, BlockHash(bytes(16)), 60.0, adapter=ref
        )
        if not self.adapters.is_ready(start):
            await self.adapters.prepare(start, lambda: ())

    def generate(self, ref: AdapterRef) -> list[int]:
        driver = Driver(self.executor)
        sequence = driver.start(PROMPT, PARAMS, adapter=ref.key)
        driver.finish(sequence)
        return sequence.generated


@pytest.fixture(params=["1", "tp2", "pp2"])
async def worker(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    base = make_model(tmp_path / "base", "llama", with_tokenizer=False)
    engine = EngineConfig(
        kv_bytes=2**22, block_tokens=16, threads=1, adapters_max=2, shape=request.param, rank_timeout_s=60.0
    )
    found = Worker(Executor.load(ModelConfig(path=str(base)), engine), tmp_path, base)
    yield found
    found.threads.shutdown()
    await found.engine.close(timeout_s=10)
    found.executor.close()


async def test_unused_adapters_make_room_and_come_back_the_same(worker: Worker) -> None:
    first: list[list[int]] = []
    for ref in worker.refs:
        await worker.prepare(ref)
        first.append(worker.generate(ref))
    assert set(worker.executor.adapters.keys) == {ref.key for ref in worker.refs[1:]}
    assert len({tuple(tokens) for tokens in first}) == 3
    await worker.prepare(worker.refs[0])
    assert worker.generate(worker.refs[0]) == first[0]


async def test_adapters_in_use_stay_and_what_does_not_load_says_why(worker: Worker) -> None:
    for ref in worker.refs[:2]:
        await worker.prepare(ref)
        worker.in_use.add(ref.key)
    with pytest.raises(NotPrepared, match=r"engine\.adapters_max") as caught:
        await worker.prepare(worker.refs[2])
    assert caught.value.reason is RefusalReason.NO_ROOM
    with pytest.raises(NotPrepared, match="does not exist") as caught:
        await worker.prepare(AdapterRef("gone", "/nowhere", ""))
    assert caught.value.reason is RefusalReason.UNSUPPORTED
    worker.in_use.clear()
    await worker.prepare(worker.refs[2])
    assert worker.refs[2].key in worker.executor.adapters.keys
