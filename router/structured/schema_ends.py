"""Which JSON schemas no finite text fulfils: a value that must contain itself. Pure.

A schema holds for some finite value if what it requires does (all of it, or one of its branches). That is
the least fixed point of Horn clauses, found in time linear in the schema: Dowling and Gallier, "Linear-time
algorithms for testing the satisfiability of propositional Horn formulae", 1984.
"""

from typing import Any

Schema = dict[str, Any]


class _Clause:
    """Fulfilled once `missing` more of what it waits for are."""

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
        """By what they refer to."""
        self.first = self.of(root)
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
        else:
            self._facts.append(clause)
        return clause

    def _read(self, clause: _Clause, schema: Schema) -> None:
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                self._one_of(clause, [self.of(one) for one in schema[keyword]])
                return
        ref = schema.get("$ref")
        if ref is not None:
            target = self.refs[ref] = self.of(self._found(ref))
            self._one_of(clause, [target])
            return
        named = schema.get("type")
        kinds = set(named) if isinstance(named, list) else {named}
        if "enum" in schema or "const" in schema or kinds - {"array", "object"}:
            self._facts.append(clause)
            return
        branches: list[_Clause] = []
        for kind in kinds:
            branch = _Clause()
            needed = _needed_by_object(schema) if kind == "object" else _needed_by_array(schema)
            self._all_of(branch, [self.of(one) for one in needed])
            branches.append(branch)
        self._one_of(clause, branches)

    def _found(self, ref: str) -> Any:
        target = self._root
        for step in ref.split("/")[1:]:
            target = target[step]
        return target

    def _all_of(self, clause: _Clause, others: list[_Clause]) -> None:
        clause.missing = len(others)
        for other in others:
            other.waiting.append(clause)
        if not others:
            self._facts.append(clause)

    def _one_of(self, clause: _Clause, others: list[_Clause]) -> None:
        clause.missing = 1
        for other in others:
            other.waiting.append(clause)


def _needed_by_object(schema: Schema) -> list[Any]:
    properties: Schema = schema.get("properties", {})
    needed = [properties[name] for name in schema.get("required", ()) if name in properties]
    if schema.get("minProperties", 0) > len(properties) and "additionalProperties" in schema:
        needed.append(schema["additionalProperties"])
    return needed


def _needed_by_array(schema: Schema) -> list[Any]:
    count, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
    needed = list(prefix[:count])
    if count > len(prefix):
        needed += [schema[word] for word in ("items", "unevaluatedItems") if word in schema]
    return needed


def endless_ref(schema: Any) -> str | None:
    """The $ref because of which no finite text fulfils the checked schema; None: there are such texts."""
    clauses = _Clauses(schema)
    if clauses.first.missing <= 0:
        return None
    return next((ref for ref, clause in clauses.refs.items() if clause.missing > 0), "#")
