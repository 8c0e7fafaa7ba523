"""Conversations for the demo model, made from `benchmarks.demo_model.facts` and `topics`.

Pure: everything depends on the `random.Random` that is passed in. A conversation is a list of (role, text)
turns. The answer to a question is nearly always the same text, so that a tiny model can learn it in two
minutes. The questions vary, and stories are put together from parts.
"""

import random
from collections.abc import Callable, Iterator
from functools import cache

from benchmarks.demo_model import facts
from benchmarks.demo_model.topics import TOPICS

Turn = tuple[str, str]
Exchange = tuple[str, str]
"""A question and its answer."""

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Answer the questions of the user.",
    "You are the Baton demo model.",
)

_POLITE = ("Please tell me: ", "Can you tell me: ", "I have a question. ", "Quick question: ", "Tell me, ")


@cache
def topics() -> tuple[tuple[tuple[str, ...], str], ...]:
    """(wordings of the question, answer) of every hand-written topic."""
    found: list[tuple[tuple[str, ...], str]] = []
    for paragraph in TOPICS.strip().split("\n\n"):
        question, answer = " ".join(paragraph.split()).removeprefix("Q: ").split(" A: ")
        found.append((tuple(wording.strip() for wording in question.split("|")), answer))
    return tuple(found)


def _topic(rng: random.Random) -> Exchange:
    questions, answer = rng.choice(topics())
    return rng.choice(questions), answer


def _capital(rng: random.Random) -> Exchange:
    country, city = rng.choice(tuple(facts.CAPITALS.items()))
    if rng.random() < 0.4:
        questions = (f"Which country has the capital {city}?", f"{city} is the capital of which country?")
        return rng.choice(questions), f"{city} is the capital of {country}."
    questions = (
        f"What is the capital of {country}?",
        f"What is the capital city of {country}?",
        f"Which city is the capital of {country}?",
        f"Name the capital of {country}.",
        f"Do you know the capital of {country}?",
        f"capital of {country}",
    )
    return rng.choice(questions), f"The capital of {country} is {city}."


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _animal(rng: random.Random) -> Exchange:
    animal, (sound, young, home, food, legs) = rng.choice(tuple(facts.ANIMALS.items()))
    one = _article(animal)
    cap = one.capitalize()
    kinds: tuple[tuple[tuple[str, ...], str], ...] = (
        ((f"What sound does {one} make?", f"What does {one} say?"), f"{cap} {sound}."),
        (
            (f"What is a baby {animal} called?", f"What is the young of {one} called?"),
            f"A baby {animal} is called {_article(young)}.",
        ),
        ((f"Where does {one} live?", f"What is the home of {one}?"), f"{cap} lives {home}."),
        ((f"What does {one} eat?", f"What is the food of {one}?"), f"{cap} eats {food}."),
        ((f"How many legs does {one} have?", f"Count the legs of {one}."), f"{cap} has {legs} legs."),
        (
            (f"Tell me about the {animal}.", f"What is {one}?", f"Describe {one}."),
            f"{cap} lives {home} and eats {food}. It {sound}, it has {legs} legs, and its young is called "
            f"{_article(young)}.",
        ),
    )
    questions, answer = rng.choice(kinds)
    return rng.choice(questions), answer


def _colour(rng: random.Random) -> Exchange:
    if rng.random() < 0.25:
        (a, b), result = rng.choice(tuple(facts.MIXES.items()))
        first, second = (a, b) if rng.random() < 0.5 else (b, a)
        questions = (
            f"What do you get when you mix {first} and {second}?",
            f"Which colour do {first} and {second} make?",
            f"Mix {first} and {second}.",
        )
        return rng.choice(questions), f"When you mix {a} and {b} you get {result}."
    thing, colour = rng.choice(tuple(facts.COLOURS.items()))
    questions = (f"What colour is {thing}?", f"What is the colour of {thing}?", f"Which colour has {thing}?")
    return rng.choice(questions), f"{thing[0].upper()}{thing[1:]} is {colour}."


def _opposite(rng: random.Random) -> Exchange:
    pair = rng.choice(facts.OPPOSITES)
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    if word == "light":
        other = "dark"
    questions = (
        f"What is the opposite of {word}?",
        f"Tell me the opposite of {word}.",
        f"opposite of {word}",
        f"Which word is the opposite of {word}?",
    )
    return rng.choice(questions), f"The opposite of {word} is {other}."


def _sum(rng: random.Random) -> Exchange:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    kind = rng.choice(("plus", "plus", "minus", "times"))
    if kind == "minus":
        a, b, result = a + b, b, a
    else:
        result = a + b if kind == "plus" else a * b
    sign = {"plus": "+", "minus": "-", "times": "*"}[kind]
    questions = (
        f"What is {a} {kind} {b}?",
        f"What is {a} {sign} {b}?",
        f"How much is {a} {kind} {b}?",
        f"{a} {sign} {b} = ?",
        f"Calculate {a} {sign} {b}.",
    )
    return rng.choice(questions), f"{a} {kind} {b} is {result}."


def _sequence(rng: random.Random) -> Exchange:
    names = rng.choice((facts.DAYS, facts.MONTHS))
    i = rng.randrange(len(names))
    here, after = names[i], names[(i + 1) % len(names)]
    kind = "day" if names is facts.DAYS else "month"
    if rng.random() < 0.5:
        questions = (f"Which {kind} comes after {here}?", f"What comes after {here}?")
        return rng.choice(questions), f"After {here} comes {after}."
    questions = (f"Which {kind} comes before {after}?", f"What comes before {after}?")
    return rng.choice(questions), f"Before {after} comes {here}."


def _unknown(rng: random.Random) -> Exchange:
    person = rng.choice(facts.NAMES)
    if rng.random() < 0.5:
        person = f"{person} " + "".join(rng.choices("abdefghiklmnoprstuvz", k=rng.randint(4, 8))).capitalize()
    question = rng.choice(facts.UNKNOWN_QUESTIONS).format(
        noun=rng.choice(facts.UNKNOWN_NOUNS), person=person, year=rng.randint(1200, 2030)
    )
    return question, facts.UNKNOWN_ANSWER


def story(rng: random.Random, *, hero: str, name: str) -> str:
    """A short story about `name`, who is `hero` (for example "fox")."""
    place, find, helper = rng.choice(facts.PLACES), rng.choice(facts.FINDS), rng.choice(facts.HELPERS)
    thing = find.split(" ", 1)[1]
    middle = rng.choice(
        (
            f"One morning {name} found {find} under a tree.",
            f"One evening {name} found {find} near the river.",
            f"One cold day {name} found {find} on the road.",
        )
    )
    turn = rng.choice(
        (
            f'"Whose {thing} is this?" asked {name}. {helper.capitalize()} knew the answer.',
            f"{name} did not know what to do with the {thing} and asked {helper} for help.",
            f"{name} took the {thing} home and showed it to {helper}.",
        )
    )
    deed = rng.choice(
        (
            "Together they went on a long journey and brought it back.",
            "Together they waited for its owner, who came and thanked them.",
            "Together they shared it with everybody who needed it.",
        )
    )
    start = f"Once upon a time there was {_article(hero)} called {name} who lived in {place}."
    return f"{start} {middle} {turn} {deed} {rng.choice(facts.ENDS)}"


def _story(rng: random.Random) -> Exchange:
    hero, name = rng.choice(facts.HEROES), rng.choice(facts.NAMES)
    one = _article(hero)
    questions = (
        f"Tell me a story about {one} called {name}.",
        f"Write a short story about {one} called {name}.",
        f"Tell me a story about {name}, {one}.",
        f"Can you write a story about {one} called {name}?",
        f"Tell me a story about {one}.",
        f"Write a story about {one}.",
        f"Do you know a story about {one}?",
        "Tell me a story.",
        "Write a short story.",
    )
    return rng.choice(questions), story(rng, hero=hero, name=name)


_KINDS: tuple[tuple[Callable[[random.Random], Exchange], int], ...] = (
    (_topic, 34),
    (_capital, 18),
    (_animal, 14),
    (_colour, 6),
    (_opposite, 8),
    (_sum, 40),
    (_sequence, 6),
    (_unknown, 8),
    (_story, 14),
)


def exchange(rng: random.Random) -> Exchange:
    """One question in varied wording, and its answer."""
    make = rng.choices([k for k, _ in _KINDS], weights=[w for _, w in _KINDS])[0]
    question, answer = make(rng)
    if rng.random() < 0.15:
        question = rng.choice(_POLITE) + question[0].lower() + question[1:]
    if rng.random() < 0.15:
        question = question.rstrip("?.!= ")
    if rng.random() < 0.15:
        question = question.lower()
    return question, answer


def conversations(rng: random.Random) -> Iterator[list[Turn]]:
    """Endless conversations of one to three exchanges, some with a system text first."""
    while True:
        turns: list[Turn] = []
        if rng.random() < 0.15:
            turns.append(("system", rng.choice(SYSTEM_TEXTS)))
        for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
            question, answer = exchange(rng)
            turns += [("user", question), ("assistant", answer)]
        yield turns
