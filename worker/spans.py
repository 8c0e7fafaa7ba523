"""Spans of the phases a worker runs, from the events and actions of its core.

router `request` → `prefill` (accepted … first token), `decode` (accepted … last token) with its
`kv.transfer`, or `aggregated`. The core knows nothing of this: its driver shows events and actions here.
"""

from typing import Any

from baton.core.ids import SeqKey
from baton.core.messages import (
    CancelSequence,
    Phase,
    SequenceFailed,
    SequenceJoined,
    SequenceOutput,
    SequenceRefused,
    StartSequence,
    StepOutput,
    WorkerMessage,
)
from baton.telemetry.tracing import Spans
from worker.events import FromRouter, ToRouter, WorkerAction, WorkerEvent


class PhaseSpans:
    def __init__(self, spans: Spans, worker: str) -> None:
        self._spans, self._worker = spans, worker
        self._prefills: set[SeqKey] = set()

    def on_event(self, event: WorkerEvent) -> None:
        match event:
            case FromRouter(_, StartSequence() as start) if start.traceparent:
                key = SeqKey(start.seq_id, start.epoch)
                if start.phase is Phase.PREFILL:
                    self._prefills.add(key)
                self._spans.open(
                    key,
                    str(start.phase),
                    parent=start.traceparent,
                    worker=self._worker,
                    sequence=start.seq_id,
                    epoch=start.epoch,
                    tokens=len(start.tokens),
                )
            case FromRouter(_, CancelSequence(seq_id, epoch)):
                self._close(SeqKey(seq_id, epoch), error="cancelled")
            case _:
                pass

    def on_action(self, action: WorkerAction) -> None:
        if isinstance(action, ToRouter):
            self._on_message(action.message)

    def _on_message(self, message: WorkerMessage) -> None:
        match message:
            case StepOutput(outputs):
                for output in outputs:
                    self._output(output)
            case SequenceJoined():
                key = SeqKey(message.seq_id, message.epoch)
                self._spans.note(key, "joined", handover_s=message.handover_s)
                moved = message.transferred_bytes
                self._spans.record(key, "kv.transfer", message.transfer_s, bytes=moved)
            case SequenceFailed() | SequenceRefused():
                self._close(SeqKey(message.seq_id, message.epoch), error=str(message.reason))
            case _:
                pass

    def _output(self, output: SequenceOutput) -> None:
        key = SeqKey(output.seq_id, output.epoch)
        if output.finish is not None or key in self._prefills:
            self._close(key, cached_tokens=output.cached_token_count or 0)

    def _close(self, key: SeqKey, *, error: str = "", **attributes: Any) -> None:
        self._prefills.discard(key)
        self._spans.close(key, error=error, **attributes)
