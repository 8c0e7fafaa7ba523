"""What a client must receive, and what it did receive: its bytes, read as a client reads them."""

import math
from typing import Any

import msgspec

from baton.core.sampling import FinishReason
from router.openai.beam import BeamSearch
from simulator.faults.client import SimClient, SimSequence
from simulator.faults.model import EOS, VOCABULARY, Expected, fake_logprob, text_of
from simulator.faults.scenario import Scenario


class Choice(msgspec.Struct):
    """One text of an answer, received or expected."""

    text: str = ""
    tokens: list[int] = []
    finish: str | None = None

    @property
    def token_count(self) -> int:
        return len(self.tokens)


class ReceivedAnswer(msgspec.Struct):
    """An answer as the client read it."""

    choices: dict[int, Choice] = {}
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False
    """The stream ended with [DONE]."""
    after_end: str = ""
    """What came after the end of a stream."""
    vectors: list[list[float]] = []


def read_stream(data: bytes) -> ReceivedAnswer:
    """Read server-sent events."""
    answer = ReceivedAnswer()
    for line in data.decode().split("\n\n"):
        if not line:
            continue
        if answer.is_done or answer.error is not None:
            answer.after_end = answer.after_end or line
        value = line.removeprefix("data: ")
        if value == "[DONE]":
            answer.is_done = True
            continue
        event: dict[str, Any] = msgspec.json.decode(value.encode())
        if "error" in event:
            answer.error = event["error"]
        for part in event.get("choices", ()):
            choice = answer.choices.setdefault(part["index"], Choice(tokens=[]))
            if choice.finish is not None:
                answer.after_end = answer.after_end or line
            choice.text += part.get("text", "")
            choice.tokens += part.get("token_ids") or []
            choice.finish = part["finish_reason"] or choice.finish
        answer.usage = event.get("usage") or answer.usage
    return answer


def read_whole(data: bytes) -> ReceivedAnswer:
    body: dict[str, Any] = msgspec.json.decode(data)
    answer = ReceivedAnswer(usage=body.get("usage"), error=body.get("error"))
    if body.get("object") == "list":
        answer.vectors = [one["embedding"] for one in body["data"]]
        return answer
    for part in body.get("choices", ()):
        answer.choices[part["index"]] = Choice(
            part["text"], list(part["token_ids"] or []), part["finish_reason"]
        )
    return answer


def expected_choice(sequence: SimSequence) -> Choice:
    """Return what the client gets of one sequence. The first stop string ends it: the one that is complete
    first, and of several the longest."""
    body, expected = sequence.client.body, sequence.expected
    stops: list[str] = body.get("stop", [])
    text = ""
    for count, token in enumerate(expected.generated, 1):
        is_end = token == EOS and not body.get("ignore_eos")
        if not is_end:
            text += text_of((token,))
        found = [stop for stop in stops if text.endswith(stop)] if token != EOS else []
        if found:
            longest = max(map(len, found))
            return Choice(text[: len(text) - longest], expected.generated[:count], "stop")
    finish = "stop" if expected.finish is FinishReason.STOP else "length"
    return Choice(text, list(expected.generated), finish)


def expected_choices(client: SimClient, *, all_of_them: bool = False) -> list[Choice]:
    """Return the choices of a completion, in order: those of the answer, or `all_of_them`."""
    choices = [expected_choice(sequence) for sequence in client.sequences]
    wanted = client.body.get("n", 1)
    size = client.body.get("best_of", wanted)
    if wanted == size or all_of_them:
        return choices
    found: list[Choice] = []
    for at in range(0, len(choices), size):
        group = sorted(choices[at : at + size], key=lambda c: sum(c.tokens) / max(1, c.token_count))
        found += group[:wanted]
    return found


def expected_beams(client: SimClient, scenario: Scenario) -> tuple[list[Choice], int]:
    """Return the choices of a beam search without any cluster, and the sequences that it takes."""
    found: list[Choice] = []
    sequences = 0
    for prompt in client.prompts:
        search = BeamSearch(
            width=client.body["n"],
            length_penalty=1.0,
            eos_token_ids=(EOS,),
            max_tokens=client.body["max_tokens"],
        )
        top = min(search.alternatives, VOCABULARY)
        while not search.is_over:
            sequences += len(search.running)
            search.step([_next_tokens(client, (*prompt, *one.tokens), top) for one in search.running])
        for one in search.ended:
            is_end = one.tokens[-1] == EOS
            found.append(Choice(text_of(one.tokens), list(one.tokens), "stop" if is_end else "length"))
    return found, sequences


def _next_tokens(client: SimClient, tokens: tuple[int, ...], top: int) -> tuple[tuple[int, float], ...]:
    return fake_logprob(0, Expected.state_after(tokens, client.owner), top).top


def expected_vectors(client: SimClient) -> list[list[float]]:
    vectors: list[list[float]] = []
    for sequence in client.sequences:
        numbers = sequence.expected.embedding
        length = math.sqrt(math.fsum(x * x for x in numbers))
        vectors.append([x / length for x in numbers])
    return vectors
