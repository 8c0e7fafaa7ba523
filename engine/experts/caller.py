"""The side of a worker: rows of a layer go to the ranks that hold their experts, and the results come back.

The thread that computes calls `begin` and `finish`. A thread of our own connects to ranks, watches for their
ends and their signs of life, and does what `ExpertRoutes` decides. Nobody waits for a rank without a
deadline: one that is silent is left out. Rows that no rank can take wait for a map that has one, as long as
the process lives. Their worker is parked, and requests end by their own deadlines.
"""

import ctypes
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.config.experts import ExpertsConfig
from baton.core.errors import PeerFailure
from baton.core.experts import (
    ExpertEpochUsed,
    ExpertMapUpdate,
    ExpertRankRef,
    ExpertRankSuspected,
)
from baton.core.ids import ExpertRankId
from engine.experts.doors import LocalLink
from engine.experts.exchange import ROW_BF16, ROW_F32, ROW_INT8, Bell, SlotLayout, functions
from engine.experts.far_links import FarLink
from engine.native.library import BF16, F32
from engine.scheduling.expert_parking import ExpertParking
from engine.scheduling.expert_routes import (
    CloseExpertRank,
    ConnectExpertRank,
    ExpertRoutes,
    RouteAction,
    RouteTable,
)

log = logging.getLogger(__name__)

WATCH_S = 0.05
"""The thread that watches looks this often for signs of life."""
PAUSE_S = 0.2
"""If it could not look for this long, this process was held up, and silence of others means nothing yet."""
SLICE_S = 0.2
"""The computing thread looks this often whether a rank is late."""
CONNECTS_MAX = 8
"""Connections that are made at one time."""
LATE_MAX = 64
CLOSE_S = 5.0
"""The longest time that `close` waits for the computing thread to give up its rows."""

ExpertReport = ExpertEpochUsed | ExpertRankSuspected


class ExpertsUnavailable(Exception):
    """The caller was closed while rows were away, or waited for a rank."""


Link = LocalLink | FarLink


@dataclass(slots=True)
class _Open:
    """A link that rows are sent over, and when its rank last showed a sign of life."""

    rank_id: ExpertRankId
    link: Link
    beat: int
    beat_s: float


@dataclass(slots=True, eq=False)
class Dispatch:
    """Rows that are away."""

    number: int
    epoch: int
    """The epoch of the map that it uses, for `ExpertRoutes`."""
    results: Tensor
    """float32 [T, k, hidden], complete after `finish`."""
    kept: tuple[Tensor, ...]
    """Memory that the native side reads meanwhile."""
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class CallerStats:
    """Totals since the start."""

    rows: int
    """Rows sent; one counts once for each rank that it went to."""
    pairs: int
    """Results asked for: a row and one of its experts."""
    row_bytes: int
    result_bytes: int
    rerouted: int
    """Pairs that were sent a second time, since their rank failed."""
    waited_s: float
    """Time that the computing thread waited for results."""


class ExpertCaller:
    """Owned by one process of a worker. `use` may be called from any thread."""

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        layer_count: int,
        expert_count: int,
        hidden: int,
        dtype: torch.dtype,
        name: str,
        report: Callable[[ExpertReport], None],
        on_parked: Callable[[bool], None] = lambda is_parked: None,
    ) -> None:
        """layer_count: of the model's layers that have experts. dtype: of the model. `report` is called from
        several threads, and `on_parked` from one of the caller's own. Raises NativeUnavailable."""
        self._config, self._name, self._tell = config, name, report
        self._parking, self._on_parked = ExpertParking(config.park_after_s), on_parked
        self.overlaps = config.overlap
        self._native = functions()
        self._experts, self._hidden = expert_count, hidden
        self._wire_dtype = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
        self._layout = slot_layout(config, hidden, dtype)
        self._bell = Bell()
        self._caller = self._native.baton_caller_new(self._bell.address)
        self._routes = ExpertRoutes(layer_count, expert_count, retry_s=config.answer_timeout_s)
        self._changed = threading.Condition(threading.RLock())
        """Guards the routes and the links; told when the table changes."""
        self._open: dict[int, _Open] = {}
        self._connector = ThreadPoolExecutor(CONNECTS_MAX, thread_name_prefix="experts-connect")
        self._host = socket.gethostname()
        self._under_way: dict[int, Dispatch] = {}
        """Dispatches whose memory the native side writes to, even if an error keeps `finish` from coming."""
        self._waited_s = 0.0
        self._is_used = False
        """Whether the computing thread is in `begin` or `finish`."""
        self._is_closed = False
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._wake, False)
        self._watcher = threading.Thread(target=self._watch, name="experts-watch", daemon=True)
        self._watcher.start()

    # --- for the control plane's side ------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        with self._changed:
            return self._routes.epoch

    def use(self, update: ExpertMapUpdate) -> None:
        """Use a map from the next dispatch on. Older ones are ignored."""
        with self._changed:
            self._do(self._routes.on_map(update, now_s=time.monotonic()))
            self._changed.notify_all()

    def wait_complete(self, timeout_s: float) -> bool:
        """Wait until every expert has a rank that is connected."""
        with self._changed:
            return self._changed.wait_for(lambda: self._routes.is_complete, timeout_s)

    @property
    def is_parked(self) -> bool:
        """Whether rows have waited for `experts.park_after_s` for experts that no rank holds."""
        return self._parking.is_parked

    def missing_s(self) -> float:
        """Return the time since the start for which rows waited for experts that no rank held."""
        with self._changed:
            return self._parking.waited_s(now_s=time.monotonic())

    def stalled_s(self) -> float:
        """Return the time since the start in which rows waited, or some expert could not be reached."""
        with self._changed:
            return self._parking.stalled_s(now_s=time.monotonic())

    # --- for the thread that computes ------------------------------------------------------------------

    def begin(self, layer: int, x: Tensor, chosen: Tensor) -> Dispatch:
        """Send rows to their experts. layer: counted among those that have experts. x [T, hidden], chosen
        int64 [T, k]. `finish` must follow, also after an error elsewhere. Raises ExpertsUnavailable."""
        rows = x.detach().to("cpu", self._wire_dtype)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        experts = chosen.to("cpu").contiguous()
        results = torch.empty((*experts.shape, self._hidden), dtype=torch.float32)
        with self._changed:
            if self._is_closed:
                raise ExpertsUnavailable("the worker ends")
            epoch, table = self._routes.on_dispatch(), self._routes.table
            self._is_used = True
        number: int = self._native.baton_caller_begin(
            *(self._caller, rows.data_ptr(), len(rows), rows.stride(0) * rows.element_size()),
            *(BF16 if rows.dtype is torch.bfloat16 else F32, self._hidden),
            *(experts.data_ptr(), experts.shape[1], layer, self._experts),
            *(table.starts.ctypes.data, table.links.ctypes.data, results.data_ptr()),
        )
        sent = Dispatch(number, epoch, results, (rows, experts), x.device, x.dtype)
        self._under_way[number] = sent
        self._is_used = False
        return sent

    def finish(self, sent: Dispatch, weights: Tensor) -> Tensor:
        """Wait for the results and mix them: sum over j of weights[t, j] * result[t, j], in the order of j,
        in float32. weights float32 [T, k] -> [T, hidden]. Raises ExpertsUnavailable."""
        begun_s = time.monotonic()
        with self._changed:
            if self._is_closed:  # the rows' memory may be gone
                raise ExpertsUnavailable("the worker ends")
            self._is_used = True
        try:
            self._collect(sent)
        finally:
            self._waited_s += time.monotonic() - begun_s
            self._native.baton_caller_end(self._caller, sent.number)
            with self._changed:
                del self._under_way[sent.number]
                self._is_used = False
                self._parking.rows_are_sent(now_s=time.monotonic())
                self._changed.notify_all()
                self._do(self._routes.on_dispatched(sent.epoch))
        return self._mix(sent, weights)

    def stats(self) -> CallerStats:
        numbers = (ctypes.c_int64 * 5)()
        with self._changed:
            if not self._is_closed:
                self._native.baton_caller_stats(self._caller, numbers)
        return CallerStats(*numbers, waited_s=self._waited_s)

    def close(self) -> None:
        """Close all connections. Whoever computes gets ExpertsUnavailable."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        os.write(self._waker, b"x")
        self._watcher.join()
        self._connector.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            is_unused = self._changed.wait_for(lambda: not self._is_used, CLOSE_S)
            for number in list(self._open):
                self._close_link(number)
        if not is_unused:
            log.error("a step does not give up its rows: the memory of its links is left as it is")
            return
        self._native.baton_caller_free(self._caller)
        self._bell.close()
        os.close(self._wake)
        os.close(self._waker)

    # --- results ---------------------------------------------------------------------------------------

    def _collect(self, sent: Dispatch) -> None:
        refused = np.zeros(2, dtype=np.int32)
        while not self._is_closed:
            outcome: int = self._native.baton_caller_finish(
                *(self._caller, sent.number, int(SLICE_S * 1e9), refused.ctypes.data)
            )
            if outcome == 0:
                return
            if outcome == 1:
                self._send_again(sent, refused)
            else:
                self._leave_out_late(sent)
        raise ExpertsUnavailable("the worker ends while rows are with expert ranks, or wait for one")

    def _send_again(self, sent: Dispatch, refused: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> None:
        """Send what came back unserved by the present table; wait for another one where it does not do."""
        with self._changed:
            number, expert = refused.tolist()
            link = self._open.get(number)
            if link is not None and expert >= 0:
                self._routes.on_refused(link.rank_id, expert)
            elif link is not None:
                self._fail(number, "it makes no sense of rows", is_gone=False)
            table = self._routes.table
            now_s = time.monotonic()
            if not self._reroute(sent, table):
                self._parking.rows_are_sent(now_s=now_s)
                return
            self._parking.rows_wait(now_s=now_s)
            sent.epoch, actions = self._routes.on_waiting(sent.epoch)
            self._do(actions)
            # Results of the others go on arriving meanwhile: their slots wait.
            self._changed.wait_for(lambda: self._routes.table is not table or self._is_closed, SLICE_S)

    def _reroute(self, sent: Dispatch, table: RouteTable) -> int:
        left: int = self._native.baton_caller_reroute(
            *(self._caller, sent.number, self._experts, table.starts.ctypes.data, table.links.ctypes.data)
        )
        return left

    def _leave_out_late(self, sent: Dispatch) -> None:
        """Ranks that live but do not answer are left out."""
        limit_s = self._config.compute_timeout_s
        found = np.zeros(LATE_MAX, dtype=np.int32)
        count: int = self._native.baton_caller_late(
            self._caller, sent.number, int(limit_s * 1e9), found.ctypes.data, LATE_MAX
        )
        for number in found[:count].tolist():
            self._fail(number, f"it did not answer for {limit_s:g} s", is_gone=False)

    def _mix(self, sent: Dispatch, weights: Tensor) -> Tensor:
        tokens, chosen_count, hidden = sent.results.shape
        scales = weights.to("cpu", torch.float32).contiguous()
        out = torch.empty((tokens, hidden), dtype=self._wire_dtype)
        self._native.baton_combine_rows(
            *(sent.results.data_ptr(), scales.data_ptr(), tokens, chosen_count, hidden),
            *(BF16 if out.dtype is torch.bfloat16 else F32, out.data_ptr()),
        )
        return out.to(sent.device, sent.dtype)

    # --- links -----------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[RouteAction]) -> None:
        """Call it under the lock."""
        for action in actions:
            match action:
                case ConnectExpertRank(link, ref):
                    if not self._is_closed:
                        self._connector.submit(self._connect, link, ref)
                case CloseExpertRank(link):
                    self._close_link(link)
                case ExpertEpochUsed() | ExpertRankSuspected():
                    self._tell(action)

    def _connect(self, number: int, ref: ExpertRankRef) -> None:
        try:
            link = self._dial(ref)
        except PeerFailure as error:
            with self._changed:
                now_s = time.monotonic()
                # Nobody listens there any more, so that the process has ended.
                is_gone = isinstance(error.__cause__, ConnectionError)
                failed = self._routes.on_failed(ref.rank_id, number, str(error), is_gone=is_gone, now_s=now_s)
                self._do(failed)
                self._changed.notify_all()
            return
        with self._changed:
            if self._is_closed or not self._routes.is_current(ref.rank_id, number):
                link.close()
                return
            self._native.baton_caller_link(
                *(self._caller, number, link.memory.address, *self._layout.numbers, link.bell_address)
            )
            self._open[number] = _Open(ref.rank_id, link, link.last_beat, time.monotonic())
            self._routes.on_connected(ref.rank_id, number)
            self._changed.notify_all()
        os.write(self._waker, b"x")  # the watcher takes it up

    def _dial(self, ref: ExpertRankRef) -> Link:
        """Raises PeerFailure."""
        if ref.host == self._host:
            try:
                return LocalLink.connect(ref, self._layout, self._bell, caller=self._name)
            except PeerFailure as error:
                # There is no such socket on another host, or in another network namespace, of the same name.
                if not (ref.address and isinstance(error.__cause__, ConnectionRefusedError)):
                    raise
        return FarLink.connect(ref, self._layout, self._bell, caller=self._name)

    def _close_link(self, number: int) -> None:
        """Call it under the lock. What the link had goes back to its dispatch, which sends it elsewhere."""
        opened = self._open.pop(number, None)
        if opened is None:
            return
        self._native.baton_caller_unlink(self._caller, number)
        opened.link.close()

    def _fail(self, number: int, reason: str, *, is_gone: bool) -> None:
        with self._changed:
            opened = self._open.get(number)
            if opened is None:
                return
            log.warning("expert rank %s gets no more rows: %s", opened.rank_id, reason)
            now_s = time.monotonic()
            self._do(self._routes.on_failed(opened.rank_id, number, reason, is_gone=is_gone, now_s=now_s))
            self._close_link(number)
            self._changed.notify_all()

    # --- watching --------------------------------------------------------------------------------------

    def _watch(self) -> None:
        looked_s = time.monotonic()
        while not self._is_closed:
            gone = self._wait_for_ends()
            for number in gone:
                opened = self._open.get(number)
                if opened is not None:
                    self._fail(number, opened.link.end_reason(), is_gone=True)
            now_s = time.monotonic()
            was_held_up = now_s - looked_s > PAUSE_S
            looked_s = now_s
            self._look_for_beats(now_s, was_held_up=was_held_up)
            with self._changed:
                due_s = self._routes.next_tick_s
                if due_s is not None and due_s <= now_s:
                    self._do(self._routes.tick(now_s=now_s))
            self._look_at_parking(now_s)

    def _look_at_parking(self, now_s: float) -> None:
        with self._changed:
            has_ranks, is_complete = bool(len(self._routes.table.links)), self._routes.is_complete
            has_changed = self._parking.look(has_ranks=has_ranks, is_complete=is_complete, now_s=now_s)
            is_parked = self._parking.is_parked
        if has_changed:
            what = "no rank has what its rows need" if is_parked else "its rows have ranks again"
            log.warning("%s is %s: %s", self._name, "parked" if is_parked else "parked no more", what)
            self._on_parked(is_parked)

    def _wait_for_ends(self) -> list[int]:
        """Wait for `WATCH_S`, or until links end. Returns their numbers."""
        with selectors.DefaultSelector() as selector, self._changed:
            selector.register(self._wake, selectors.EVENT_READ)
            for number, opened in self._open.items():
                selector.register(opened.link.fileno(), selectors.EVENT_READ, number)
            self._changed.release()
            try:
                ready = selector.select(WATCH_S)
            finally:
                self._changed.acquire()
        numbers = [key.data for key, _ in ready if key.data is not None]
        if len(numbers) < len(ready):
            os.read(self._wake, 4096)
        return numbers

    def _look_for_beats(self, now_s: float, *, was_held_up: bool) -> None:
        limit_s = self._config.answer_timeout_s
        silent: list[int] = []
        with self._changed:
            for number, opened in self._open.items():
                beat = opened.link.last_beat
                if beat != opened.beat or was_held_up:
                    opened.beat, opened.beat_s = beat, now_s
                elif now_s - opened.beat_s > limit_s:
                    silent.append(number)
        for number in silent:
            self._fail(number, f"no sign of life for {limit_s:g} s", is_gone=False)


def slot_layout(config: ExpertsConfig, hidden: int, dtype: torch.dtype) -> SlotLayout:
    """The slots of a caller of a model of this hidden size and data type."""
    of_model = ROW_BF16 if dtype is torch.bfloat16 else ROW_F32
    result = F32 if config.rows == "exact" or dtype is not torch.bfloat16 else BF16
    return SlotLayout.of(hidden, ROW_INT8 if config.rows == "int8" else of_model, result)
