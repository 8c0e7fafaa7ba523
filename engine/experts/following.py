"""The connection of one process of a worker to its group of expert ranks: the maps that the control plane
announces, and what it is told.

A thread of its own keeps a stream to the control plane open, so that the processes of all ranks of a worker
are alike. While the control plane is away, the present map goes on to be used.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from baton.core.errors import SetupError
from baton.core.experts import (
    ExpertCallerHello,
    ExpertCallerReport,
    ExpertCountsReport,
    ExpertMapUpdate,
    ExpertRankSuspected,
)
from baton.wire.link import LinkBroken
from engine.experts.access import ExpertAccess
from engine.experts.caller import CallerStats, ExpertCaller, ExpertReport
from engine.experts.routed import RemoteExperts
from engine.model_files.check_experts import divisible_experts
from engine.model_files.division import Division
from engine.models.expert_counts import Counts
from engine.native.build import NativeUnavailable

log = logging.getLogger(__name__)

RETRY_S, RETRY_MAX_S = 0.2, 2.0
IDLE_S = 1.0
"""A thread that has nothing to send looks this often whether the stream is over."""
REPORTS_MAX = 1024
"""Reports that wait for a control plane; the oldest go."""


class MapStream(Protocol):
    """A stream to the control plane."""

    def __iter__(self) -> Iterator[ExpertMapUpdate]:
        """Raises LinkBroken when the stream is over."""
        ...

    def close(self) -> None:
        """End it. Any thread may call it."""
        ...


OpenMapStream = Callable[[str, Iterable[ExpertCallerReport]], MapStream]
"""Opens a stream to the control plane at an address, on which messages go as they come, the hello first."""


class ExpertConnection:
    """Makes the process's `ExpertCaller` when the model's layers are read, and keeps its map."""

    def __init__(self, access: ExpertAccess, open_stream: OpenMapStream) -> None:
        self.access, self._open_stream = access, open_stream
        self._caller: ExpertCaller | None = None
        self._stream: MapStream | None = None
        self._thread: threading.Thread | None = None
        self._reports: deque[ExpertReport | ExpertCountsReport] = deque(maxlen=REPORTS_MAX)
        self._changed = threading.Condition()
        self._is_closed = False
        self._counted: Counts | None = None
        self._on_parked: Callable[[bool], None] | None = None
        self.suspected_count = 0
        """Ranks that were left out since they did not answer."""

    def routed(self, division: Division, dtype: torch.dtype) -> RemoteExperts:
        """Connect for `load_model`. Raises SetupError: a model without experts, or no native kernels."""
        moe = divisible_experts(division.spec)
        try:
            caller = self._caller = ExpertCaller(
                self.access.config,
                layer_count=len(moe.layers),
                expert_count=moe.expert_count,
                hidden=division.spec.hidden_size,
                dtype=dtype,
                name=self.access.caller,
                report=self._report,
                on_parked=self._parked,
            )
        except NativeUnavailable as error:
            raise SetupError(
                f"experts.parallel needs the native kernels, which are not here: {error}"
            ) from error
        self._thread = threading.Thread(target=self._run, name="experts-map", daemon=True)
        self._thread.start()
        return RemoteExperts.of(caller, division)

    def wait_ready(self) -> None:
        """Wait until every expert has a rank that is connected. Raises SetupError."""
        if self._caller is None:
            raise SetupError(
                "experts.parallel: this model runs through transformers' modules, which hold all experts; "
                "leave --expert-parallel and --experts out"
            )
        timeout_s = self.access.start_timeout_s
        if not self._caller.wait_complete(timeout_s):
            raise SetupError(
                f"the experts of {self.access.group} are not all on ranks that can be reached after "
                f"{timeout_s:g} s; `baton experts` shows the ranks"
            )

    def report_counts(self, counts: Counts) -> None:
        """Tell the control plane the tokens of each expert, int64 [L, E] since the engine started."""
        before, self._counted = self._counted, counts
        new = counts if before is None else counts - before
        if new.any():
            flat = tuple(int(count) for count in new.reshape(-1))
            layers, experts = counts.shape
            self._report(ExpertCountsReport(layers, experts, flat))

    def stats(self) -> CallerStats | None:
        return self._caller.stats() if self._caller is not None else None

    def watch_parking(self, on_parked: Callable[[bool], None]) -> None:
        """Call `on_parked` when the process's rows wait for experts that no rank holds, and when they do not
        any more; at once if they wait now. Another thread calls it."""
        with self._changed:
            self._on_parked = on_parked
            if self.is_parked:
                on_parked(True)

    @property
    def is_parked(self) -> bool:
        return self._caller is not None and self._caller.is_parked

    def missing_s(self) -> float:
        """Return the time since the start for which rows waited for experts that no rank held."""
        return self._caller.missing_s() if self._caller is not None else 0.0

    def stalled_s(self) -> float:
        """Return the time since the start in which rows waited, or some expert could not be reached."""
        return self._caller.stalled_s() if self._caller is not None else 0.0

    @property
    def epoch(self) -> int:
        return self._caller.epoch if self._caller is not None else 0

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self._stream is not None:
                self._stream.close()
        if self._thread is not None:
            self._thread.join(RETRY_MAX_S)
        if self._caller is not None:
            self._caller.close()

    def _report(self, report: ExpertReport | ExpertCountsReport) -> None:
        """Any thread may call it."""
        with self._changed:
            self.suspected_count += isinstance(report, ExpertRankSuspected)
            self._reports.append(report)
            self._changed.notify_all()

    def _parked(self, is_parked: bool) -> None:
        with self._changed:
            if self._on_parked is not None:
                self._on_parked(is_parked)

    # --- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        retry_s, has_told = RETRY_S, False
        while not self._is_closed:
            begun_s = time.monotonic()
            try:
                self._follow()
            except LinkBroken as error:
                if not (has_told or self._is_closed):
                    log.warning("no new maps of experts, going on with the present one: %s", error)
                has_told = True
            if time.monotonic() - begun_s > RETRY_MAX_S:
                retry_s, has_told = RETRY_S, False
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)

    def _follow(self) -> None:
        """Use the maps that come, until the stream breaks. Raises LinkBroken."""
        caller = self._caller
        assert caller is not None
        is_over = threading.Event()
        stream = self._open_stream(self.access.control_address, self._messages(caller.epoch, is_over))
        with self._changed:
            self._stream = stream
            if self._is_closed:
                stream.close()
        try:
            for update in stream:
                caller.use(update)
        finally:
            is_over.set()
            with self._changed:
                self._stream = None
                self._changed.notify_all()
            stream.close()

    def _messages(self, epoch: int, is_over: threading.Event) -> Iterator[ExpertCallerReport]:
        """The hello and then what there is to report, on a thread of the stream's."""
        yield ExpertCallerHello(self.access.caller, self.access.worker_id, self.access.group, epoch)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reports or is_over.is_set() or self._is_closed, IDLE_S)
                if is_over.is_set() or self._is_closed:
                    return
                report = self._reports.popleft() if self._reports else None
            if report is not None:
                yield report
