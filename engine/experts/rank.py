"""An expert rank: it holds experts and computes the rows that callers send it, whoever they are.

One thread computes: what waits of one layer, of all callers, is one grouped product. Others accept callers,
show signs of life, and load experts beside it.
"""

import ctypes
import logging
import secrets
import socket
import threading
import time

import numpy as np
import torch
from torch import Tensor

from baton.config import EngineConfig, ModelConfig
from baton.config.experts import ExpertsConfig
from baton.core.errors import PeerFailure, SetupError
from baton.core.experts import ExpertRankRef
from baton.core.ids import ExpertRankId
from baton.wire.address import host_port
from engine.experts.bank import ExpertBank, HeldExpert
from engine.experts.copies import fetch_image
from engine.experts.doors import LocalDoor
from engine.experts.exchange import Bell, MappedMemory, SlotLayout, functions
from engine.experts.far_door import FarDoor
from engine.experts.memory import ExpertMemory
from engine.kernels.native import ACTIVATIONS, NativeKernels
from engine.native.build import NativeUnavailable
from engine.native.library import BF16, F32

log = logging.getLogger(__name__)

BEAT_S = 0.05
SERVE_S = 0.1
"""The computing thread looks this often whether the rank is closed."""
BATCH_PAIRS_MAX = 4096
"""Pairs of a row and an expert in one product, beyond the first caller's."""


class ExpertRankEngine:
    """Implements `engine.experts.doors.LinkHost`. Call `start` once; `close` ends all threads."""

    def __init__(self, bank: ExpertBank, *, slots: int) -> None:
        """slots: experts of each layer that the rank has memory for. Raises SetupError."""
        self._bank, self.slots = bank, slots
        try:
            self._native = functions()
        except NativeUnavailable as error:
            raise SetupError(
                f"experts.parallel needs the native kernels, which are not here: {error}"
            ) from error
        self.hidden, self.secret = bank.spec.hidden_size, secrets.token_hex(16)
        self.bell = Bell()
        self._is_native = isinstance(bank.kernels, NativeKernels)
        is_narrow = bank.dtype is torch.bfloat16
        self._wire_dtype = torch.bfloat16 if is_narrow else torch.float32
        self._rank: int = self._native.baton_rank_new(
            *(self.bell.address, bank.layer_count, bank.expert_count, BF16 if is_narrow else F32),
            *(ACTIVATIONS[bank.spec.activation], BATCH_PAIRS_MAX),
        )
        self._name = ""
        self._held: dict[int, HeldExpert] = {}
        self._leaving: dict[int, HeldExpert] = {}
        """Experts that were dropped, and that a batch which was taken before may still need."""
        self._lock = threading.Lock()
        self._link_count = 0
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._doors: list[LocalDoor | FarDoor] = []
        self.failure: BaseException | None = None
        """Why the computing thread ended, if it did."""
        self._expert_bytes = bank.load(0).byte_count
        most = bank.experts.memory_bytes
        self._memory = ExpertMemory(most, expert_bytes=self._expert_bytes, device=bank.device)

    @classmethod
    def load(
        cls, model: ModelConfig, engine: EngineConfig, experts: ExpertsConfig, *, slots: int
    ) -> "ExpertRankEngine":
        """Open the checkpoint; no expert is kept yet. Raises SetupError, see `ExpertBank`."""
        return cls(ExpertBank(model, engine, experts), slots=slots)

    @property
    def layer_count(self) -> int:
        return self._bank.layer_count

    @property
    def expert_count(self) -> int:
        return self._bank.expert_count

    @property
    def group_count(self) -> int:
        return self._bank.group_count

    @property
    def slots_max(self) -> int:
        """Experts of each layer that the rank's memory holds at most. It tries its own share in any case,
        unless `experts.memory_bytes` is less."""
        most = self._memory.slots_max(self.layer_count, self.expert_count)
        return most if self._memory.is_configured else max(most, self.slots)

    @property
    def expert_bytes(self) -> int:
        """Size of one expert of one layer in memory."""
        return self._expert_bytes

    @property
    def held(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(self._held))

    @property
    def rows(self) -> int:
        """Rows computed since the start; one that went to two experts counts twice."""
        return self._stats()[0]

    @property
    def busy_s(self) -> float:
        """Time spent computing since the start."""
        return self._stats()[1] / 1e9

    def start(self, *, host: str, rank_id: ExpertRankId, reached_at: str = "") -> ExpertRankRef:
        """Accept callers. host: the interface to listen on. reached_at: the host that callers of other hosts
        dial; empty: `host`. Raises SetupError."""
        self._name = rank_id
        name = f"baton-experts-{rank_id}-{secrets.token_hex(8)}"
        try:
            self._doors.append(LocalDoor(name, self))
            far = FarDoor(host, self)
        except OSError as error:
            raise SetupError(f"expert rank {rank_id} cannot listen on {host}: {error.strerror}") from error
        self._doors.append(far)
        for target in (self._beat, self._serve):
            thread = threading.Thread(target=target, name=f"experts-{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()
        address = host_port(reached_at or host, far.port)
        return ExpertRankRef(rank_id, socket.gethostname(), name, address, self.secret)

    def load_expert(self, expert: int, source: ExpertRankRef | None = None) -> bool:
        """Take rows for an expert from now on. It blocks: call it on a thread of its own. The expert is
        copied from the memory of `source`, and read from the model's files if that fails or there is none.
        Return whether it was copied. Raises SetupError, and RankFull where there is no memory for it."""
        if not 0 <= expert < self.layer_count * self.expert_count:
            raise SetupError(f"there is no expert {expert}")
        if expert in self._held:
            return False
        self._memory.check(len(self._held))
        copied = self._copied(expert, source) if source is not None else None
        found = copied or self._bank.load(expert)
        with self._lock:
            self._held[expert] = found
            pointers = (found.gate_up.pointer, found.down.pointer) if self._is_native else (None, None)
            self._native.baton_rank_set(self._rank, expert, 1, *pointers)
        return copied is not None

    def _copied(self, expert: int, source: ExpertRankRef) -> HeldExpert | None:
        bank, limit = self._bank, self._bank.experts.migration_bytes_per_s
        if bank.experts.copies != "peers" or not bank.image_kind:
            return None
        try:
            image = fetch_image(
                *(source, expert, bank.image_kind, bank.image_bytes), bytes_per_s=limit, caller=self._name
            )
        except PeerFailure as error:
            log.info("an expert is read from the files: %s", error)
            return None
        return bank.from_image(image)

    def drop_expert(self, expert: int) -> None:
        """Take no more rows for an expert, and give its memory up."""
        with self._lock:
            if expert in self._held:
                self._native.baton_rank_set(self._rank, expert, 0, None, None)
                dropped = self._held.pop(expert)
                if not self._is_native:
                    self._leaving[expert] = dropped

    def close(self) -> None:
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self.bell.ring()
        for thread in self._threads:
            thread.join()
        for door in self._doors:
            door.close()
        self._native.baton_rank_free(self._rank)
        self.bell.close()
        self._held.clear()

    # --- LinkHost --------------------------------------------------------------------------------------

    def open_link(self, layout: SlotLayout, memory: MappedMemory, bell: Bell) -> int:
        with self._lock:
            self._link_count += 1
            number = self._link_count
        self._native.baton_rank_link(self._rank, number, memory.address, *layout.numbers, bell.address)
        return number

    def expert_image(self, expert: int, kind: str) -> Tensor:
        with self._lock:
            held = self._held.get(expert)
        if held is None:
            raise PeerFailure(f"expert {expert} is not here")
        own_kind = self._bank.kind_of(held)
        if kind != own_kind:
            raise PeerFailure(f"expert {expert} is {own_kind or 'not to be copied'} here, not {kind}")
        return self._bank.image_of(held)

    def close_link(self, number: int) -> None:
        self._native.baton_rank_unlink(self._rank, number)

    # --- threads ---------------------------------------------------------------------------------------

    def _stats(self) -> tuple[int, int]:
        if self._is_closed.is_set():
            return 0, 0
        numbers = (ctypes.c_int64 * 2)()
        self._native.baton_rank_stats(self._rank, numbers)
        return numbers[0], numbers[1]

    def _beat(self) -> None:
        while not self._is_closed.wait(BEAT_S):
            if self.failure is None:
                self.bell.beat()

    def _serve(self) -> None:
        serve = self._serve_native if self._is_native else self._serve_batch
        try:
            with torch.inference_mode():
                while not self._is_closed.is_set():
                    serve()
        except BaseException as error:
            log.exception("the rank computes no more")
            self.failure = error

    def _serve_native(self) -> None:
        failed = self._native.baton_rank_serve(self._rank, int(SERVE_S * 1e9))
        assert not failed, "float32 activations, bfloat16 weights"

    def _serve_batch(self) -> None:
        """Compute one batch through the kernels of another device."""
        self._leaving.clear()
        sizes = (ctypes.c_int64 * 2)()
        pairs: int = self._native.baton_rank_take(self._rank, int(SERVE_S * 1e9), sizes)
        if not pairs:
            return
        begun_s = time.perf_counter()
        layer, rows = sizes
        x = torch.empty((rows, self.hidden), dtype=self._wire_dtype)
        order = np.empty(pairs, dtype=np.int32)
        starts = np.empty(self.expert_count + 1, dtype=np.int32)
        self._native.baton_rank_rows(
            self._rank, self.hidden, x.data_ptr(), order.ctypes.data, starts.ctypes.data
        )
        device = self._bank.device
        found = self._bank.compute(
            layer,
            x.to(device, self._bank.dtype),
            torch.from_numpy(order).to(device, torch.int64),
            starts.tolist(),
            lambda expert: self._held.get(expert) or self._leaving[expert],
        )
        out = found.to("cpu").contiguous()
        busy_ns = int((time.perf_counter() - begun_s) * 1e9)
        self._native.baton_rank_done(self._rank, out.data_ptr(), self.hidden, busy_ns)
