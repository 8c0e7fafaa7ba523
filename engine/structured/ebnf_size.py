"""How large a grammar in EBNF may be for its compilation to take seconds, not minutes. Pure.

Measured with xgrammar 0.2.8, 32,000 tokens, one core: 300 parts like `[a-z]*` in a row 30 s and 64 of them
0.9 s (it grows with the third power), 24 nested repetitions 2.9 s and 16 of them 0.9 s, 60 rules of 20
alternatives that begin alike and lead to one another 50 s, 20 rules 1 s. No count tells all that is costly
from what is not, so the compiler has a deadline as well.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

from engine.structured.ebnf import Alternatives, Element, read_ebnf
from engine.structured.patterns import NESTED_REPEATS_MAX, SKIPPED_MAX
from engine.structured.refusal import refuse
from engine.structured.size import BRANCHES_MAX, PARTS_MAX

GRAMMAR_CHARACTERS_MAX = 64 * 1024
RULES_MAX = 2048
TEXTS_MAX = 4096
"""Alternatives of one choice that are nothing but a text."""
ELEMENTS_MAX = 20_000
"""Characters of texts and other elements with repetitions written out; each is a state of the automaton."""


class _Sizes:
    def __init__(self, rules: dict[str, Alternatives], where: str) -> None:
        self._rules, self._where = rules, where
        self._rule = ""
        self._skipped: dict[str, int | None] = {}
        """How many parts of a rule may be left out in a row, if all of it may be left out."""
        self.parts = 0
        self.elements = 0

    def check(self) -> None:
        if len(self._rules) > RULES_MAX:
            raise refuse(self._where, "", f"{len(self._rules)} rules{_SLOW} {RULES_MAX} are allowed")
        for name in self._inner_first():
            self._rule = name
            count, self._skipped[name] = self._alternatives(self._rules[name], repeats=0)
            self.elements += count
            if self.elements > ELEMENTS_MAX:
                self._refuse(f"more than {ELEMENTS_MAX} elements, repetitions written out,", "shorten it")
            if self.parts > PARTS_MAX:
                self._refuse(f"more than {PARTS_MAX} alternatives and repetitions", "shorten it")

    def _inner_first(self) -> Iterator[str]:
        """The rules, each after those that it refers to, unless they refer to one another."""
        seen: set[str] = set()
        for start in self._rules:
            if start in seen:
                continue
            seen.add(start)
            todo = [(start, iter(list(_references(self._rules[start]))))]
            while todo:
                name, inner = todo[-1]
                one = next((ref for ref in inner if ref not in seen), None)
                if one is None:
                    yield name
                    todo.pop()
                else:
                    seen.add(one)
                    todo.append((one, iter(list(_references(self._rules[one])))))

    def _alternatives(self, alternatives: Alternatives, *, repeats: int) -> tuple[int, int | None]:
        """Return the elements, and how many parts in a row may be left out (None: something must come)."""
        elements, skipped = 0, None
        others = sum(1 for one in alternatives if len(one) > 1 or one[0].text_length is None)
        if others > BRANCHES_MAX:
            self._refuse(f"a choice of {others} alternatives", f"at most {BRANCHES_MAX} are allowed")
        if len(alternatives) - others > TEXTS_MAX:
            self._refuse(f"a choice of {len(alternatives)} texts", f"at most {TEXTS_MAX} are allowed")
        self.parts += others if len(alternatives) > 1 else 0
        for sequence in alternatives:
            count, left_out = self._sequence(sequence, repeats)
            elements += count
            if left_out is not None:
                skipped = max(skipped or 0, left_out)
        return elements, skipped

    def _sequence(self, sequence: list[Element], repeats: int) -> tuple[int, int | None]:
        elements, run, is_skipped = 0, 0, True
        for element in sequence:
            count, skipped = self._element(element, repeats)
            elements += count
            if skipped is None:
                run, is_skipped = 0, False
            else:
                run += skipped
            if run > SKIPPED_MAX:
                advice = "list the cases as alternatives, or put something between that must come"
                self._refuse(f"more than {SKIPPED_MAX} parts in a row that may be left out", advice)
        return elements, run if is_skipped else None

    def _element(self, element: Element, repeats: int) -> tuple[int, int | None]:
        if element.rule is not None:
            return 1, self._skipped.get(element.rule)
        if element.text_length is not None:
            return element.text_length, 0 if element.text_length == 0 else None
        if element.group is None:
            return 1, None
        if element.is_repeated:
            repeats += 1
            self.parts += 1
            if repeats > NESTED_REPEATS_MAX:
                self._refuse(f"more than {NESTED_REPEATS_MAX} nested repetitions", "give some of them a rule")
        count, skipped = self._alternatives(element.group, repeats=repeats)
        times = element.high
        if skipped is not None:
            skipped = skipped * times + (1 if element.low == 0 else 0)
        elif element.low == 0:
            skipped = 1
        return count * times, skipped

    def _refuse(self, what: str, advice: str) -> NoReturn:
        raise refuse(self._where, "", f"rule {self._rule!r:.80}: {what} take too long to compile; {advice}")


_SLOW = " take too long to compile, at most"


def _references(alternatives: Alternatives) -> Iterator[str]:
    todo = [element for sequence in alternatives for element in sequence]
    while todo:
        element = todo.pop()
        if element.rule is not None:
            yield element.rule
        todo += [one for sequence in element.group or () for one in sequence]


def ebnf_size(text: Any, where: str) -> tuple[int, int]:
    """Check a grammar in EBNF. Return how many alternatives and repetitions it has, and how many elements.
    Raises ClientError that names what is wrong, or the bound."""
    if not isinstance(text, str) or not text.strip():
        raise refuse(where, "", "must be a grammar in EBNF (GBNF)")
    if len(text) > GRAMMAR_CHARACTERS_MAX:
        raise refuse(where, "", f"may have at most {GRAMMAR_CHARACTERS_MAX} characters, not {len(text)}")
    if "\0" in text:
        raise refuse(where, "", "may have no null characters")
    sizes = _Sizes(read_ebnf(text, where), where)
    sizes.check()
    return sizes.parts, sizes.elements
