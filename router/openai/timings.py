"""Where the time to a request's first token went, and who served it, as clients are told. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from router.openai.choice_stream import ChoiceStream

PARTS = (
    "route",
    "tokenize",
    "queue",
    "retries",
    "wait",
    "load",
    "prefill",
    "first_hop",
    "transfer",
    "first_decode",
)
"""In the order in which they happen. The time to first token is the sum of all but the last two."""


class EdgeTimes(NamedTuple):
    """Of one request, before its sequences were submitted; seconds."""

    route_s: float = 0.0
    """From the request's head on: its body is read and checked, its sequences are made."""
    tokenize_s: float = 0.0
    """Waiting for the tokenizer included."""


def parts_of(edge: EdgeTimes, choice: ChoiceStream) -> Iterator[tuple[str, float]]:
    """(part, seconds) in order; those of the workers only if they told."""
    yield "route", edge.route_s
    yield "tokenize", edge.tokenize_s
    if (latency_breakdown := choice.latency_breakdown) is not None:
        for part in PARTS[2:]:
            yield part, getattr(latency_breakdown, f"{part}_s")


def first_of(choices: Sequence[ChoiceStream]) -> ChoiceStream:
    """The one whose token came first: the request's time to first token is its."""
    return min(choices, key=lambda choice: choice.first_token_s or float("inf"))


def timings_body(edge: EdgeTimes, choices: Sequence[ChoiceStream]) -> dict[str, Any]:
    """The answer's `baton` object."""
    choice = first_of(choices)
    body: dict[str, Any] = {"timings": {f"{part}_s": round(s, 6) for part, s in parts_of(edge, choice)}}
    if (served := choice.served) is not None:
        body |= {
            "prefill_worker": served.prefill_worker,
            "decode_worker": served.decode_worker,
            "predicted_ttft_s": served.predicted_ttft_s,
            "predicted_tpot_s": served.predicted_tpot_s,
            "attempts": served.attempts,
        }
    return body
