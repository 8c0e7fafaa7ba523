"""References within a schema, written as references to definitions of the root. Pure.

The checker rewrites schemas, so that a pointer into the middle of one may lead nowhere afterwards. Only '#',
'#/$defs/NAME' and '#/definitions/NAME' are kept; the target of any other pointer is copied to a definition.
"""

from typing import Any
from urllib.parse import unquote

from engine.structured.refusal import refuse

Schema = dict[str, Any]

DEFINITIONS = ("$defs", "definitions")


class References:
    """The references of one schema, and the targets that have still to become definitions."""

    def __init__(self, root: Schema, where: str) -> None:
        self._root, self._where = root, where
        self._names: dict[int, str] = {}
        """The definition of each target that is copied. A target has one, however pointers spell its path."""
        self._todo: list[tuple[str, Any, str]] = []

    def kept(self, ref: Any, path: str) -> str:
        """The reference to write in place of `ref`. Raises ClientError for one that leads nowhere."""
        if ref == "#":
            return "#"
        if not isinstance(ref, str) or not ref.startswith("#/"):
            raise refuse(path, "$ref", "only references within the schema ('#' and '#/…') are supported")
        target = self.target(ref, path)
        steps = ref[2:].split("/")
        if len(steps) == 2 and steps[0] in DEFINITIONS and not {"~", "%"} & set(ref):
            return ref
        if id(target) not in self._names:
            self._names[id(target)] = self._free_name()
            where = ".".join((self._where, *map(_unescaped, steps)))
            self._todo.append((self._names[id(target)], target, where))
        return f"#/$defs/{self._names[id(target)]}"

    def target(self, ref: str, path: str) -> Any:
        """What stands where `ref` points to. Raises ClientError if nothing does."""
        found: Any = self._root
        for step in map(_unescaped, ref.split("/")[1:]):
            if isinstance(found, dict) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and len(step) < 6 and int(step) < len(found):
                found = found[int(step)]
            else:
                raise refuse(path, "$ref", f"{ref!r:.200} does not exist")
        return found

    def next_copy(self) -> tuple[str, Any, str] | None:
        """Name, schema and path of a target that has to become a definition."""
        return self._todo.pop() if self._todo else None

    def _free_name(self) -> str:
        taken = self._root.get("$defs")
        number = len(self._names)
        while isinstance(taken, dict) and f"copy{number}" in taken:
            number += 1
        name = f"copy{number}"
        while name in self._names.values():
            name += "_"
        return name


def _unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")
