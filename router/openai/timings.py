"""The parts of the time to a request's first token, and the workers that served it, as clients see them.
Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from router.decisions.events import PREDICTIONS
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
"""Parts in the order in which they happen. The time to first token is the sum of all but the last two."""


class EdgeTimes(NamedTuple):
    """Seconds that one request took before its sequences were submitted."""

    route_s: float = 0.0
    """Time from the request's head until its sequences are made: its body is read and checked."""
    tokenize_s: float = 0.0
    """Time of tokenising, including the wait for the tokenizer."""


def parts_of(edge: EdgeTimes, choice: ChoiceStream) -> Iterator[tuple[str, float]]:
    """Yield (part, seconds) in order. Parts of workers are missing if the workers did not report them."""
    yield "route", edge.route_s
    yield "tokenize", edge.tokenize_s
    if (latency_breakdown := choice.latency_breakdown) is not None:
        for part in PARTS[2:]:
            yield part, getattr(latency_breakdown, f"{part}_s")


def first_of(choices: Sequence[ChoiceStream]) -> ChoiceStream:
    """Return the choice whose token came first. It decides the time to first token of the request."""
    return min(choices, key=lambda choice: choice.first_token_s or float("inf"))


def timings_body(edge: EdgeTimes, choices: Sequence[ChoiceStream]) -> dict[str, Any]:
    """Return the answer's `baton` object."""
    choice = first_of(choices)
    parts = dict(parts_of(edge, choice))
    body: dict[str, Any] = {"timings": {f"{part}_s": round(s, 6) for part, s in parts.items()}}
    if choice.latency_breakdown is not None:
        body["ttft_s"] = round(sum(parts[part] for part in PARTS[:-2]), 6)
        body["tpot_s"] = None if choice.tpot_s is None else round(choice.tpot_s, 6)
    if (served := choice.served) is not None:
        body |= {
            "prefill_worker": served.prefill_worker,
            "decode_worker": served.decode_worker,
            **{name: getattr(served, name) for name in PREDICTIONS},
            "attempts": served.attempts,
        }
    return body
