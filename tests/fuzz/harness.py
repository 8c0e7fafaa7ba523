"""What all fuzzers share: the command line, the mutation of inputs, and the bounds of time and memory.

With atheris installed, libFuzzer chooses the inputs by the branches that they take. Without it, or with
`--plain`, they are drawn from a seed, which is what the tests do.
"""

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import logging
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path(os.environ.get("BATON_FUZZ_FOUND", "/tmp/baton-fuzz"))
"""Folder for inputs that showed a defect."""
INPUT_S = 10.0
"""Time in which every input must be dealt with."""
MEMORY_BYTES = 3 * 2**30
"""Memory that one input may take beyond what the process had before."""
INPUT_BYTES_MAX = 1 << 16
MESSAGE_CHARS_MAX = 4000

Check = Callable[[bytes], None]
INTERESTING = (
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**64 - 1,
)


class TooSlow(BaseException):
    """One input took longer than `INPUT_S`. It is no Exception, so that nothing catches it on the way."""


class Fuzzer(NamedTuple):
    name: str
    check: Check
    """Raises for an input that shows a defect."""
    words: tuple[bytes, ...] = ()
    """Pieces that valid inputs are made of."""


def check_message(error: Exception) -> None:
    """What an operator or a log gets to see is one line of bounded length."""
    message = str(error)
    assert "\n" not in message
    assert len(message) <= MESSAGE_CHARS_MAX


def seeds_of(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*")) if path.is_file()]


def mutated(content: bytes, others: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> bytes:
    """A damaged copy of an input."""
    data = bytearray(content)
    for _ in range(1 + int(rng.expovariate(0.5))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.randrange(256)
            case 2:
                width = rng.choice((1, 2, 4, 8))
                value = rng.choice(INTERESTING) % 256**width
                data[at : at + width] = value.to_bytes(width, rng.choice(("little", "big")))
            case 3:
                del data[at : at + rng.randrange(1, 33)]
            case 4:
                data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randrange(1, 65)]
            case 5 if others:
                other = rng.choice(others)
                data[at:] = other[rng.randrange(len(other) + 1) :]
            case 6 if words:
                data[at:at] = rng.choice(words)
            case _:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(data[:INPUT_BYTES_MAX])


@contextlib.contextmanager
def bounded_memory() -> Generator[None]:
    """Make an allocation beyond the bound a MemoryError instead of a dead machine."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _bounded_time() -> Generator[None]:
    def over(*_: object) -> None:
        raise TooSlow(f"an input took more than {INPUT_S} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, INPUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def try_one(fuzzer: Fuzzer, content: bytes, *, is_timed: bool = True) -> None:
    """Check one input. One that shows a defect is kept in `FOUND`, and its error raised. Tests have a time
    limit of their own, which uses the same signal."""
    try:
        with _bounded_time() if is_timed else contextlib.nullcontext():
            fuzzer.check(content)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        FOUND.mkdir(parents=True, exist_ok=True)
        kept = FOUND / f"{fuzzer.name}-{hashlib.sha256(content).hexdigest()[:12]}"
        kept.write_bytes(content)
        print(f"{fuzzer.name}: {type(error).__name__} by the input in {kept}", file=sys.stderr)
        raise


def run_plain(
    fuzzer: Fuzzer,
    *,
    seed: int,
    seconds: float | None = None,
    count: int | None = None,
    is_timed: bool = True,
) -> int:
    """Try every seed and then damaged ones until the time or the count is over; returns how many. What is
    drawn depends on the seed alone."""
    rng = random.Random(seed)
    seeds = seeds_of(fuzzer.name)
    assert seeds, f"no corpus for {fuzzer.name}"
    pool = list(seeds)
    tried = 0
    ends_s = time.monotonic() + (seconds if seconds is not None else float("inf"))
    with bounded_memory():
        for content in seeds:
            try_one(fuzzer, content, is_timed=is_timed)
            tried += 1
        while (count is None or tried < count) and time.monotonic() < ends_s:
            content = mutated(rng.choice(pool), pool, fuzzer.words, rng)
            try_one(fuzzer, content, is_timed=is_timed)
            tried += 1
            if rng.random() < 0.02:  # so that damage adds up
                pool = [*seeds, *pool[len(seeds) :][-200:], content]
    return tried


def _run_guided(fuzzer: Fuzzer, *, seed: int, seconds: float) -> None:
    """Ends the process when the time is over, or with an error at the first finding."""
    atheris = importlib.import_module("atheris")
    work = FOUND / f"{fuzzer.name}-corpus"
    work.mkdir(parents=True, exist_ok=True)
    words = FOUND / f"{fuzzer.name}.words"
    words.write_text(
        "".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in fuzzer.words)
    )
    options = [
        sys.argv[0],
        f"-max_total_time={int(seconds)}",
        f"-seed={seed or 1}",
        f"-timeout={int(INPUT_S)}",
        f"-rss_limit_mb={MEMORY_BYTES // 2**20 + 1024}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-artifact_prefix={FOUND}/{fuzzer.name}-",
        "-print_final_stats=1",
        *([f"-dict={words}"] if fuzzer.words else []),
        str(work),
        str(CORPUS / fuzzer.name),
    ]
    atheris.Setup(options, fuzzer.check)
    atheris.Fuzz()


def main(load: Callable[[], Fuzzer], packages: Sequence[str], argv: Sequence[str] | None = None) -> None:
    """The command of one fuzzer. `load` imports what is to be fuzzed; branches in `packages`, which nothing
    may have imported before, guide the choice of inputs."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to search")
    parser.add_argument("--seed", type=int, default=1, help="seed of the inputs")
    parser.add_argument("--plain", action="store_true", help="draw inputs without atheris")
    parser.add_argument("--input", type=Path, help="try this one input, and nothing else")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    if args.input is not None:
        try_one(load(), args.input.read_bytes())
        return
    guided = not args.plain and importlib.util.find_spec("atheris") is not None
    if guided:
        atheris = importlib.import_module("atheris")
        with atheris.instrument_imports(include=list(packages)):
            fuzzer = load()
        _run_guided(fuzzer, seed=args.seed, seconds=args.seconds)
        return
    fuzzer = load()
    began_s = time.monotonic()
    try:
        tried = run_plain(fuzzer, seed=args.seed, seconds=args.seconds)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    print(f"{fuzzer.name}: {tried} inputs in {time.monotonic() - began_s:.0f} s, nothing found")
