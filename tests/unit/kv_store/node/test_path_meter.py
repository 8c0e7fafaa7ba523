from kv_store.node.counts import PathMeter


def test_a_path_that_was_slow_is_believed_to_be_well_after_a_while_without_use():
    meter = PathMeter(second_per_byte=1e-9, latency_s=0.001)
    for i in range(20):
        meter.done(1000, block_count=1, started_s=i, now_s=i + 0.9)
    slow_per_byte, slow_latency_s = meter.at(20.0)
    assert slow_per_byte > 1e-4
    assert slow_latency_s > 0.5
    per_byte, latency_s = meter.at(300.0)
    assert per_byte < 1e-8
    assert latency_s < 0.002


def test_one_good_use_after_that_does_not_bring_the_bad_times_back():
    meter = PathMeter(second_per_byte=1e-9, latency_s=0.001)
    for i in range(20):
        meter.done(1000, block_count=1, started_s=i, now_s=i + 0.9)
    meter.done(1_000_000, block_count=1, started_s=300.0, now_s=300.001)
    per_byte, latency_s = meter.at(300.001)
    assert per_byte < 2e-8
    assert latency_s < 0.002
