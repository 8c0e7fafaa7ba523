"""How the kernels of each class are compiled for all its processors at once, ahead of any start.

A library compiled ahead computes the same bits as one that its machine compiled for itself.
"""

import platform
from dataclasses import dataclass

from engine.native.classes import CLASSES, CpuClass

_X86_64_V3 = frozenset(
    {"abm", "avx", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "lahf_lm", "movbe", "pni", "popcnt"}
    | {"sse4_1", "sse4_2", "ssse3", "xsave"}
)
"""Flags of /proc/cpuinfo for what `-march=x86-64-v3` lets the compiler use."""
_OPTIONS = {
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512vl": "-mavx512vl",
    "avx512dq": "-mavx512dq",
    "avx512_vnni": "-mavx512vnni",
    "avx512_bf16": "-mavx512bf16",
    "avx512vbmi": "-mavx512vbmi",
    "avx512_fp16": "-mavx512fp16",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
    "amx_int8": "-mamx-int8",
}
"""The compiler's option for each flag of /proc/cpuinfo beyond x86-64-v3."""
_MORE_NEEDS = {"amx": frozenset({"avx512_fp16"})}
"""Instructions beyond the class's needs that the sources use where they are, and that every known processor
of the class has. One without them compiles for itself, and computes other bits
(docs/decisions/0083-weights-in-short-groups-are-scaled-first.md)."""
_DEFINED = {"amx": ("-DBATON_AMX=1",)}
_TUNED = {
    "amx": "sapphirerapids",
    "avx512_bf16": "znver3",
    "avx512_vnni": "cascadelake",
    "avx512": "skylake-avx512",
    "avx2": "znver3",
}
"""The processor in `-mtune=`, which changes the order of instructions and no result. It is what g++ 12, which
does not know Zen 4 and 5 yet, takes by itself on a typical processor of the class."""


@dataclass(frozen=True, slots=True)
class AheadClass:
    name: str
    needs: frozenset[str]
    """Flags of /proc/cpuinfo for everything that the compiler may use. A processor that lacks one must not
    load the library: it could meet an instruction that it does not know."""
    flags: tuple[str, ...]


def ahead_classes() -> tuple[AheadClass, ...]:
    """What is compiled ahead on this kind of machine, the fastest class first. Machines other than x86-64
    have plain loops only, compiled for the least of their processors."""
    if platform.machine() != "x86_64":
        return (AheadClass("generic", frozenset(), ()),)
    return tuple(_ahead(one) for one in CLASSES if not one.is_emulated)


def _ahead(cpu_class: CpuClass) -> AheadClass:
    name = cpu_class.name
    if not cpu_class.needs:
        return AheadClass(name, cpu_class.needs, cpu_class.flags)
    needs = cpu_class.needs | _MORE_NEEDS.get(name, frozenset()) | _X86_64_V3
    options = [option for flag, option in _OPTIONS.items() if flag in needs]
    flags = ("-march=x86-64-v3", f"-mtune={_TUNED[name]}", *options, *_DEFINED.get(name, ()))
    return AheadClass(name, needs, flags)
