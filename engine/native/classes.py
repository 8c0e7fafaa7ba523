"""Classes of processors: which instructions the kernels are compiled for, the fastest that is here first.

What is computed for a row depends on the class, to the last bit, and on nothing else: the class follows from
the processor (or `BATON_CPU_CLASS`), never from a measurement, so that equal machines agree.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "BATON_CPU_CLASS"


@dataclass(frozen=True, slots=True)
class CpuClass:
    name: str
    needs: frozenset[str]
    """Flags of /proc/cpuinfo."""
    flags: tuple[str, ...]
    """The compiler's, in place of `-march=native` alone."""
    is_emulated: bool = False
    """Runs anywhere, slowly, for tests: never chosen by itself."""


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512vbmi", "avx512_vnni"}
_AVX512_VNNI = _AVX512 | {"avx512_vnni"}
_AMX = _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}

_GENERIC = "-march=x86-64" if platform.machine() == "x86_64" else "-march=native"
"""What every processor of the kind has: bits of a class may not depend on what else one of them has."""

CLASSES = (
    CpuClass("amx", _AMX, ("-march=native", "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DBATON_AMX=1")),
    CpuClass("avx512_bf16", _AVX512_BF16, ("-march=native",)),
    CpuClass("avx512_vnni", _AVX512_VNNI, ("-march=native", "-mno-avx512bf16")),
    CpuClass("avx512", _AVX512, ("-march=native", "-mno-avx512bf16", "-mno-avx512vnni")),
    CpuClass("avx2", _AVX2, ("-march=native", "-mno-avx512f")),
    CpuClass("generic", frozenset(), (_GENERIC,)),
    CpuClass("amx-emulated", frozenset(), ("-march=native", "-DBATON_AMX=2"), is_emulated=True),
)


def candidates() -> tuple[CpuClass, ...]:
    """Classes to try in turn: the one that is asked for, or all that the processor has the instructions of.

    Raises ValueError: `BATON_CPU_CLASS` names no class, or one whose instructions are missing here.
    """
    here = processor_flags()
    asked = os.environ.get(ENVIRONMENT, "").strip()
    if not asked:
        return tuple(one for one in CLASSES if one.needs <= here and not one.is_emulated)
    found = next((one for one in CLASSES if one.name == asked), None)
    if found is None:
        names = ", ".join(one.name for one in CLASSES)
        raise ValueError(f"{ENVIRONMENT}={asked}: choose one of {names}, or leave it unset")
    if missing := found.needs - here:
        raise ValueError(f"{ENVIRONMENT}={asked}: this processor has no {', '.join(sorted(missing))}")
    return (found,)


def processor_flags() -> frozenset[str]:
    return frozenset(_cpuinfo().get("flags", "").split())


def processor_name() -> str:
    """The model as the kernel names it, such as "AMD EPYC 9B45"."""
    return _cpuinfo().get("model name", "") or platform.processor() or platform.machine()


def processor_key() -> str:
    """The processor as -march=native sees it. A cache on a shared disk serves machines of several kinds."""
    known = _cpuinfo()
    if not known:
        return f"{platform.machine()} {platform.processor()}"
    names = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(known.get(name, "") for name in names)


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}
