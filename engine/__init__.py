"""Models, kernels, KV pool, scheduler, sampling. torch is imported here and in `benchmarks` only.

Shape legend: T tokens · L layers · B blocks · P positions in a block · H kv heads · D head dim.
"""
