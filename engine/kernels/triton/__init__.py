"""Kernels for CUDA devices, written in Triton: one module per family, put together in `kernels`.

Triton is imported in this package only. Under TRITON_INTERPRET=1, set before triton is imported, the same
kernels run on host tensors.

Conventions of the kernels: parameters in lower case are run-time values, `s` (a frozen dataclass) and
those in upper case are constants of the compiled kernel; strides and offsets count elements.
"""

import os

# Multiplications and additions fuse, as everywhere in CUDA. Said aloud because Triton is about to change
# what it does when nothing is said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
