"""Models, kernels, KV pool, scheduler, sampling.

`model_files` and `scheduling` need no torch. All other subpackages may import it.

Shape legend: T tokens · L layers · B blocks · P positions in a block · H kv heads · D head dim.
"""
