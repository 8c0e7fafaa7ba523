"""References of a JSON schema that no finite text fulfils, since the value must contain itself. Pure.

A schema holds for some finite value if what it requires does (all of it, some of it, or one of its branches).
That is the least fixed point of Horn clauses, found in time linear in the schema: Dowling and Gallier,
"Linear-time algorithms for testing the satisfiability of propositional Horn formulae", 1984.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


class _Clause:
    """A statement that is fulfilled once `missing` more of what it waits for are."""

    __slots__ = ("missing", "waiting")

    def __init__(self) -> None:
        self.missing = 0
        self.waiting: list[_Clause] = []


class _Clauses:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._of: dict[int, _Clause] = {}
        self._todo: list[tuple[_Clause, Any]] = []
        self._facts: list[_Clause] = []
        self.refs: dict[str, _Clause] = {}
        """The clauses of references, by what they refer to."""
        self.of(root)
        while self._todo:
            clause, schema = self._todo.pop()
            self._read(clause, schema)
        while self._facts:
            for clause in self._facts.pop().waiting:
                clause.missing -= 1
                if clause.missing == 0:
                    self._facts.append(clause)

    def of(self, schema: Any) -> _Clause:
        known = self._of.get(id(schema)) if isinstance(schema, dict) else None
        if known is not None:
            return known
        clause = _Clause()
        if isinstance(schema, dict):
            self._of[id(schema)] = clause
            self._todo.append((clause, schema))
        elif schema is not False:
            self._facts.append(clause)
        else:
            clause.missing = 1
        return clause

    def _read(self, clause: _Clause, schema: Schema) -> None:
        for keyword in ("anyOf", "allOf"):
            if keyword in schema:
                self._at_least(1, clause, [self.of(one) for one in schema[keyword]])
                return
        ref = schema.get("$ref")
        if ref is not None:
            target = self.refs[ref] = self.of(_target(self._root, ref))
            self._at_least(1, clause, [target])
            return
        named = schema.get("type")
        branches: list[_Clause] = []
        for kind in named if isinstance(named, list) else [named]:
            branch = _Clause()
            if kind == "object":
                self._read_object(branch, schema)
            elif kind == "array":
                self._read_array(branch, schema)
            else:
                self._facts.append(branch)
            branches.append(branch)
        self._at_least(1, clause, branches)

    def _read_object(self, clause: _Clause, schema: Schema) -> None:
        properties = {name: self.of(one) for name, one in schema.get("properties", {}).items()}
        patterns = [self.of(one) for one in schema.get("patternProperties", {}).values()]
        others = patterns or [self.of(schema["additionalProperties"])]
        required, counted = _Clause(), _Clause()
        names = schema.get("required", [])
        self._at_least(len(names), required, [properties[name] for name in names])
        least = schema.get("minProperties", 0)
        self._at_least(least, counted, [*properties.values(), *others * least])
        self._at_least(2, clause, [required, counted])

    def _read_array(self, clause: _Clause, schema: Schema) -> None:
        prefix = [self.of(one) for one in schema.get("prefixItems", [])]
        items = self.of(schema["items"])
        least = schema.get("minItems", 0)
        needed = prefix[:least] + ([items] if least > len(prefix) else [])
        self._at_least(len(needed), clause, needed)

    def _at_least(self, count: int, clause: _Clause, others: list[_Clause]) -> None:
        """`clause` holds once `count` of the others do."""
        clause.missing = count
        for other in others:
            other.waiting.append(clause)
        if count == 0:
            self._facts.append(clause)


def endless_ref(schema: Any) -> str | None:
    """A $ref of the checked schema that no finite text fulfils, or None if there is no such reference."""
    return next((ref for ref, clause in _Clauses(schema).refs.items() if clause.missing > 0), None)


def circular_ref(root: Schema) -> str | None:
    """A $ref of the checked schema that comes back to itself through nothing but references and branches."""
    leads_to = {ref: set(_refs_at_once(_target(root, ref))) for ref in _Clauses(root).refs}
    led_from: dict[str, list[str]] = {}
    for ref, others in leads_to.items():
        for other in others:
            led_from.setdefault(other, []).append(ref)
    left = {ref: len(others) for ref, others in leads_to.items()}
    ends = [ref for ref, count in left.items() if count == 0]
    while ends:
        for ref in led_from.get(ends.pop(), ()):
            left[ref] -= 1
            if left[ref] == 0:
                ends.append(ref)
    return next((ref for ref, count in left.items() if count > 0), None)


def _refs_at_once(schema: Any) -> Iterator[str]:
    """The references that a value of the schema has to fulfil itself, and not something within it."""
    todo = [schema]
    while todo:
        one = todo.pop()
        if not isinstance(one, dict):
            continue
        if "$ref" in one:
            yield one["$ref"]
        todo += [*one.get("anyOf", ()), *one.get("allOf", ())]


def _target(root: Any, ref: str) -> Any:
    for step in ref.split("/")[1:]:
        root = root[step]
    return root
