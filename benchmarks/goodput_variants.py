"""The variants of `baton bench goodput`: Baton is built in, peers are described by a file.

A variant is a set of processes, one of which takes the load. Nothing of a peer is imported, and this file has
no path of anybody's machine: programs are named in the file and found on PATH, or at `--program NAME=PATH`.
An example with vLLM and sglang-router is docs/examples/goodput-peers.toml.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any

import msgspec

from baton.core.errors import SetupError

MODEL_NAME = "bench"

BATON_SETTINGS = (
    f"model.name={MODEL_NAME}",
    # A random model repeats itself, so n-gram drafts would gain more than they do on real text.
    "engine.speculation=off",
    # The store would add to the memory that each variant has for KV.
    "store.host_bytes=0",
)

KV_BYTES = 2**31
"""Memory for the KV of all workers of a variant, as much as a peer has altogether."""

_PLACEHOLDER = re.compile(r"\{([a-z_]+)(?::([A-Za-z0-9_-]+))?\}")


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process of a variant. In `command` and `env` these placeholders are filled in:

    `{model}` folder of the model; `{port:NAME}` a free port, the same wherever NAME is the same; `{cores}`
    ids of this process's cores, `{threads}` their number; `{python}` the running interpreter;
    `{program:NAME}` a path from `programs`.
    """

    name: str
    command: list[str]
    env: dict[str, str] = {}
    cores: list[int] = []
    """Positions in `--cores`; empty means all of them."""
    ready: str = ""
    """A path that answers 200 on `{port:<name>}` once the process is ready; empty means that the variant's
    warm-up waits for it."""


class ServerVariant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    processes: list[Process]
    front: str = ""
    """Name of the process whose port takes the load; empty means the last one. It starts when the others are
    ready."""
    about: str = ""
    model_name: str = MODEL_NAME
    knows_objectives: bool = False
    """Each request carries its objectives, in `baton`; then every pair of objectives is a run of its own."""
    group: str = "peers"

    @property
    def front_name(self) -> str:
        return self.front or self.processes[-1].name


class PeersFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    programs: dict[str, str] = {}
    """Maps the name in `{program:NAME}` to a program on PATH, or to its path."""
    variants: list[ServerVariant] = []


def baton_variants(settings: Sequence[str] = ()) -> list[ServerVariant]:
    """The variants of Baton. `settings` are further SECTION.FIELD=VALUE texts."""
    return [
        _baton(
            "baton-split", "one prefill and one decode worker", 2, settings, "--prefill", "1", "--decode", "1"
        ),
        _baton("baton-aggregated", "two aggregated workers", 2, settings, "--aggregated", "2"),
        _baton("baton-one", "one aggregated worker", 1, settings, "--aggregated", "1"),
    ]


def _baton(name: str, about: str, worker_count: int, settings: Sequence[str], *workers: str) -> ServerVariant:
    """Two threads and the KV memory are divided between the workers."""
    threads = 2 // worker_count
    shares = (f"engine.threads={threads}", f"engine.kv_bytes={KV_BYTES // worker_count}")
    about = f"Baton, {about}, {'a thread each' if threads == 1 else 'two threads'}"
    sets = [part for value in (*BATON_SETTINGS, *shares, *settings) for part in ("--set", value)]
    command = ["{python}", "-m", "baton", "serve", "--model", "{model}", "--port", "{port:baton}", *workers]
    process = Process("baton", [*command, *sets], {"OMP_WAIT_POLICY": "PASSIVE"}, ready="/health")
    return ServerVariant(name, [process], about=about, knows_objectives=True, group="baton")


def read_peers(path: Path, programs: Mapping[str, str]) -> list[ServerVariant]:
    """The variants of the file with their programs' paths filled in. Raises SetupError for a malformed file
    or a missing program."""
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text())
        described = msgspec.convert(raw, PeersFile)
    except OSError as error:
        raise SetupError(f"--peers {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SetupError(f"--peers {path}: {error}") from None
    unknown = set(programs) - set(described.programs)
    if unknown:
        raise SetupError(f"--program {sorted(unknown)[0]}: {path} has no such program")
    known = {**described.programs, **programs}
    names = [v.name for v in described.variants]
    if len(set(names)) < len(names):
        raise SetupError(f"--peers {path}: two variants have the same name")
    return [_with_programs(variant, known) for variant in described.variants]


def _with_programs(variant: ServerVariant, programs: Mapping[str, str]) -> ServerVariant:
    if not variant.processes or variant.front_name not in {p.name for p in variant.processes}:
        raise SetupError(f"variant {variant.name}: `front` must be the name of one of its processes")

    def value(kind: str, name: str) -> str:
        if kind != "program":
            return f"{{{kind}:{name}}}" if name else f"{{{kind}}}"
        if name not in programs:
            raise SetupError(f"variant {variant.name}: no program {name} under [programs]")
        found = which(str(Path(programs[name]).expanduser()))
        if found is None:
            raise SetupError(f"program {name} is not at {programs[name]}; give --program {name}=PATH")
        return found

    processes = [
        msgspec.structs.replace(
            p, command=[fill(t, value) for t in p.command], env={k: fill(t, value) for k, t in p.env.items()}
        )
        for p in variant.processes
    ]
    return msgspec.structs.replace(variant, processes=processes)


def fill(text: str, value: Callable[[str, str], str]) -> str:
    """Replace every `{kind}` and `{kind:name}`. Other braces stay, because a command may contain JSON."""
    return _PLACEHOLDER.sub(lambda m: value(m[1], m[2] or ""), text)


def choose(variants: Sequence[ServerVariant], wanted: str) -> list[ServerVariant]:
    """The variants of the comma-separated names, or all if it is empty. Raises SetupError for an unknown
    name."""
    if not wanted:
        return list(variants)
    by_name = {v.name: v for v in variants}
    for name in wanted.split(","):
        if name not in by_name:
            raise SetupError(f"--variants {name}: no such variant; choose from {', '.join(by_name)}")
    return [by_name[name] for name in wanted.split(",")]


def python_program() -> str:
    return sys.executable
