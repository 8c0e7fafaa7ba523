from kv_transfer.bench import run


def test_the_bench_reads_all_blocks_and_reports_rates():
    result = run(block_bytes=4096, block_count=16, seconds=0.05)
    assert result.rounds >= 1
    assert min(result.memcpy_bytes_per_s, result.raw_bytes_per_s, result.checked_bytes_per_s) > 0
    assert "16 x 4096 B" in str(result)
