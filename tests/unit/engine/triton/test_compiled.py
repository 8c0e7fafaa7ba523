"""Every kernel compiles for A100 and H100, with the tiles that production uses, within what an SM has.

The whole: `pytest tests/unit/engine/triton -m compile` (some minutes).
"""

import pytest

from engine.kernels.triton.device import H100, DeviceFacts

from . import production
from .ahead import KERNELS, Compiled, compiled_by

A100 = DeviceFacts(capability=80, sm_count=108, shared_bytes=163 * 1024)
DEVICES = {"sm_80": A100, "sm_90": H100}
MATRIX_KERNELS_OF_MANY_ROWS = {
    "attend": lambda one: "block_m=128" in one.constants,
    "product": lambda one: "block_f=128" in one.constants and "block_t=128" in one.constants,
}


SPILLS_MEASURED = 288
"""Bytes that a thread spills on Hopper in chunks, in decodes of latents, and in those of quantised KV. These
tiles were faster on an H200 than any that spill none."""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Use an empty cache, so that these tests compile everything that they look at."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def check(name: str, facts: DeviceFacts) -> list[Compiled]:
    made = compiled_by(facts, lambda: production.ALL[name](facts))
    assert made
    for one in made:
        used = one.resources()
        assert one.shared_bytes <= facts.shared_bytes, one.kernel
        is_chunk = "block_m=128" in one.constants and one.warps == 4
        is_latent = "is_latent=True" in one.constants and "block_m=64" in one.constants
        is_quantized_decode = one.kernel == "attend" and one.warps == 1
        is_measured = facts.has_wgmma and (is_chunk or is_latent or is_quantized_decode)
        most = SPILLS_MEASURED if is_measured else 0
        assert used["STACK"] <= most, f"{one.kernel} spills registers: {used} {one.constants}"
        assert used["LOCAL"] == 0, f"{one.kernel}: {used} {one.constants}"
        if facts.has_wgmma and MATRIX_KERNELS_OF_MANY_ROWS.get(one.kernel, lambda _: False)(one):
            assert "wgmma.mma_async" in one.ptx, f"{one.kernel} {one.constants}"
    return made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_compile(device) -> None:
    made = [one for name in production.CHOSEN for one in check(name, DEVICES[device])]
    assert {one.kernel for one in made} >= {kernel.__name__ for kernel in KERNELS} - {"store_latent"}
    if device == "sm_90":
        hopper = {one.kernel for one in made if "wgmma.mma_async" in one.ptx}
        assert hopper == {"attend", "product"}


@pytest.mark.compile
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", production.ALL)
def test_every_shape_compiles(name, device) -> None:
    check(name, DEVICES[device])
