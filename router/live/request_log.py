"""A log line for each request that ended, or only for those in trouble.

A line has the same record as the dashboard, see `baton.core.recent_requests`. It has no prompt and no answer.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from baton.core.recent_requests import RecentRequest

log = logging.getLogger("baton.requests")

Which = Literal["off", "troubled", "all"]

LINES_PER_S_MAX = 50
"""Most lines per second for requests in trouble, if only these are logged. Under overload there are
thousands."""

ERROR_CHARACTERS_MAX = 300
"""Most characters of an error text, which may quote what the client wrote."""

ENDED_ATTEMPT = ("retried", "refused", "migrated")
"""Notes of the end of an attempt that another one follows."""

_WARNED = ("failed", "refused")


class RequestLog:
    def __init__(self, which: Which = "off", *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._which, self._now_s = which, now_s
        self._second, self._in_second, self._left_out = 0, 0, 0

    def ended(self, *, is_trouble: bool, record: Callable[[], RecentRequest]) -> None:
        """Log a request that ended. `record` is called only if the line is written."""
        if self._which == "off" or (self._which == "troubled" and not (is_trouble and self._has_room())):
            return
        entry = record()
        level = logging.WARNING if entry.outcome in _WARNED else logging.INFO
        log.log(level, "%s", in_words(entry), extra={"fields": fields_of(entry)})

    def _has_room(self) -> bool:
        second = int(self._now_s())
        if second != self._second:
            self._second, self._in_second = second, 0
        if self._in_second >= LINES_PER_S_MAX:
            self._left_out += 1
            return False
        self._in_second += 1
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            log.warning(
                "%d more requests in trouble had no line: at most %d a second are logged",
                left_out,
                LINES_PER_S_MAX,
            )
        return True


def fields_of(record: RecentRequest) -> dict[str, Any]:
    """Return the record as fields, flat but for `parts`. Unknown and empty fields are left out."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    for name in ("moments", "arrived_s"):
        del fields[name]
    fields["lost_attempt"] = lost_attempt(record)
    return {name: value for name, value in fields.items() if value not in (None, "", {})}


def lost_attempt(record: RecentRequest) -> str:
    """Return why the first attempt of several ended; empty if there was one only."""
    if record.attempts < 2:
        return ""
    lost = next((moment for moment in record.moments if moment.what in ENDED_ATTEMPT), None)
    return lost.reason[:ERROR_CHARACTERS_MAX] if lost is not None else ""


def _printable(text: str) -> str:
    """Return the text as one line. Clients choose some of the names in it, and must not add lines to the
    log."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def in_words(s: RecentRequest) -> str:
    parts = [f"{s.request_id} {s.outcome}"]
    if s.verdict and s.verdict not in (s.outcome, "met"):
        parts[0] += f" ({s.verdict.replace('_', ' ')})"
    parts[0] += f" in {s.took_s:.3f} s"
    if s.error:
        parts.append(s.error[:ERROR_CHARACTERS_MAX])
    if s.completion_tokens or s.prompt_tokens:
        parts.append(f"{s.prompt_tokens} tokens in ({s.cached_tokens} cached), {s.completion_tokens} out")
    if s.ttft_s is not None:
        parts.append(f"TTFT {s.ttft_s:.3f} s")
    if s.tpot_s is not None:
        parts.append(f"TPOT {s.tpot_s * 1e3:.1f} ms")
    if s.prefill_worker:
        both = s.prefill_worker == s.decode_worker
        parts.append(s.prefill_worker if both else f"{s.prefill_worker} -> {s.decode_worker}")
    if s.attempts > 1:
        reason = lost_attempt(s)
        parts.append(f"{s.attempts} attempts" + (f" (the first one ended: {reason})" if reason else ""))
    if s.tenant:
        parts.append(f"tenant {s.tenant}")
    if s.slo_class:
        parts.append(f"class {s.slo_class}")
    if s.client_request_id:
        parts.append(f"x-request-id {s.client_request_id}")
    return _printable(", ".join(parts))
