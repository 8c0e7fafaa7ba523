from baton.core.transfer_backends import BACKENDS, DEFAULT_BACKENDS
from benchmarks.transfer import run


def test_the_bench_reads_all_blocks_in_every_way_and_reports_rates():
    result = run(block_bytes=4096, block_count=16, seconds=0.05)
    assert result.rounds >= 1
    assert result.backend == "cma"
    assert set(result.checked) == {name for name in DEFAULT_BACKENDS if BACKENDS[name].reads_host_memory}
    assert set(result.raw) == {"nixl", "tcp", "shared memory", "process_vm_readv"}
    assert min(*result.checked.values(), *result.raw.values(), result.memcpy_bytes_per_s) > 0
    assert result.raw[result.best_raw] == max(result.raw[name] for name in ("nixl", "tcp", "shared memory"))
    assert "16 x 4096 B" in str(result)
