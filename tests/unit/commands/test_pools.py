from commands.app import _pools


def test_both_alone_is_the_whole_cluster():
    counts = ("cluster.prefill_workers", "cluster.decode_workers", "cluster.aggregated_workers")
    assert tuple(map(_pools(None, None, 2).get, counts)) == (0, 0, 2)
    assert tuple(map(_pools(1, None, 2).get, counts)) == (1, None, 2)
    assert tuple(map(_pools(None, None, None).get, counts)) == (None, None, None)
