"""What the bench asks of a process that has loaded a model, see `model_process`. Answers are JSON."""

import msgspec


class Launch(msgspec.Struct, frozen=True):
    """The first line: what to load."""

    model: str
    """Folder."""
    shape: str
    threads: int
    """Threads of each rank."""
    kv_tokens: int
    """Tokens that the KV pools hold."""
    writes_pool: bool = True
    """Write to all KV memory before anything is timed: memory that was never written is faster than any that
    is used. It would count as memory of the leader, which has every rank's pool mapped."""


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Seconds of one prompt."""

    tokens: int
    chunk_tokens: int


class SelfTimed(msgspec.Struct, frozen=True, tag=True):
    """`StepCosts` that a worker learns when it times itself at its start."""

    chunk_tokens: int
    records: bool = True
    """Whether decode steps are recorded and replayed, as one rank and tensor ranks do, but not stages."""


class ScheduledPrefill(msgspec.Struct, frozen=True, tag=True):
    """Seconds of one prompt in chunks as a worker's scheduler makes them, by what `SelfTimed` learnt."""

    tokens: int
    chunk_tokens: int


class Decode(msgspec.Struct, frozen=True, tag=True):
    """Seconds of one step, in the mean of several steps after one that does not count."""

    batch: int
    context_tokens: int
    steps: int


class Profile(msgspec.Struct, frozen=True, tag=True):
    """Seconds of one decode step of the leader, by what it does, in the mean of several steps. None of them
    is replayed: a replayed step has no parts."""

    batch: int
    context_tokens: int
    steps: int


class Memory(msgspec.Struct, frozen=True, tag=True):
    """`RankMemory` of each rank."""


Request = Prefill | ScheduledPrefill | SelfTimed | Decode | Profile | Memory


class RankMemory(msgspec.Struct, frozen=True):
    """Memory of one rank's process, in bytes."""

    peak: int
    """The largest resident set since the process started (VmHWM): libraries, mapped files and shared memory
    count as far as they were touched."""
    libraries: int
    """The resident set of a process that has imported the engine and loaded nothing."""
    kv_pool: int
    """The rank's own part, which counts in `peak` as far as it was touched."""

    @property
    def model(self) -> int:
        """Weights, activations and the touched part of the KV pool, at the peak."""
        return self.peak - self.libraries


class ModelFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded so."""

    reason: str


class ModelLoaded(msgspec.Struct, frozen=True, tag=True):
    kernels: str


Greeting = ModelLoaded | ModelFailed
