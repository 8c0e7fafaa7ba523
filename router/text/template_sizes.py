"""Bounds on the size of what one operation of a chat template makes.

An operation in C (a method of a text, a multiplication) holds the interpreter's lock until it is done, so no
deadline reaches it. Each one that makes much of little is measured before it runs.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, cast

from jinja2 import runtime
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

ITEMS_MAX = 1 << 24
"""Most characters or items that one operation may make."""
BITS_MAX = 4096
WIDTH_MAX = 9999
"""Widest field of a format, and its highest precision."""
INDENT_MAX = 64
"""Widest indentation of JSON."""
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")
_WIDE_FIELD = re.compile(r"\d{5,}")


def bound_operations() -> None:
    """Bound the operations of all templates of this process that make much of little. transformers makes
    their environments from this class, and has no way to hand in another."""
    environment: Any = ImmutableSandboxedEnvironment
    bounded = {"+": _sum, "*": _product, "**": _power, "%": _remainder}
    environment.default_binop_table = {**environment.default_binop_table, **bounded}
    environment.intercepted_binops = frozenset(bounded)
    environment.concat = staticmethod(_concatenated)
    if environment.call is not _call:
        _call_unbounded.append(environment.call)
        environment.call = _call
        environment.from_string = _from_string(environment.from_string)
        for name, size in _FILTER_SIZES.items():
            FILTERS[name] = _bounded_filter(FILTERS[name], size)
        FILTERS["join"] = _join_filter(FILTERS["join"])
        formatter: Any = SandboxedFormatter
        formatter.format_field = _format_field
        names: Any = runtime
        names.str_join = _str_join


_call_unbounded: list[Callable[..., Any]] = []


def _check(size: int) -> None:
    if size > ITEMS_MAX:
        raise OverflowError(f"an operation would make {size} characters or items, more than {ITEMS_MAX}")


def _length(value: Any) -> int:
    return len(cast("str", value)) if isinstance(value, str | bytes | list | tuple) else 0


# --- operators ------------------------------------------------------------------------------------


def _sum(left: Any, right: Any) -> Any:
    _check(_length(left) + _length(right))
    return operator.add(left, right)


def _product(left: Any, right: Any) -> Any:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int):
            _check(_length(sequence) * count)
        elif isinstance(count, int) and count.bit_length() > BITS_MAX:
            raise OverflowError("a number is too large")
    return operator.mul(left, right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > BITS_MAX:
        raise OverflowError("a power is too large")
    return operator.pow(left, right)


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str):
        _check_format(left, right)
    return operator.mod(left, right)


def _check_format(form: str, values: Any) -> None:
    if _WIDE.search(form):
        raise OverflowError("a format is too wide")
    if isinstance(values, Mapping):
        longest = max(map(_length, cast("Mapping[str, Any]", values).values()), default=0)
    else:
        several = cast("Iterable[Any]", values) if isinstance(values, tuple) else (values,)
        longest = max(map(_length, several), default=0)
    fields = form.count("%")
    # A container is written longer than it is, and nobody formats many.
    _check(len(form) + fields * (longest + (WIDTH_MAX if fields <= ITEMS_MAX // 2 // WIDTH_MAX else 999)))


def _concatenated(pieces: Iterable[str]) -> str:
    """Join the pieces of a text, as long as it is not too long."""
    kept: list[str] = []
    size = 0
    for piece in pieces:
        size += len(piece)
        _check(size)
        kept.append(piece)
    return "".join(kept)


def _str_join(values: Iterable[Any]) -> str:
    return _concatenated(map(str, values))


def _format_field(self: Any, value: Any, spec: str) -> Any:
    if _WIDE_FIELD.search(spec):
        raise OverflowError("a format is too wide")
    return cast("Any", super(SandboxedFormatter, self)).format_field(value, spec)


# --- methods --------------------------------------------------------------------------------------


def _width(text: Any, *numbers: Any) -> int:
    return _length(text) + max((number for number in numbers if isinstance(number, int)), default=0)


def _expanded(text: str, tab: Any = 8) -> int:
    return len(text) + text.count("\t") * (tab if isinstance(tab, int) else 0)


def _replaced(text: Any, old: Any = "", new: Any = "", count: Any = None) -> int:
    text, old, new = str(text), str(old), str(new)
    times = text.count(old)
    if isinstance(count, int) and count >= 0:
        times = min(times, count)
    return len(text) + times * len(new)


def _translated(text: str, table: Any = None) -> int:
    values = cast("Mapping[Any, Any]", table).values() if isinstance(table, Mapping) else ()
    return len(text) * max([1, *map(_length, values)])


_METHOD_SIZES: dict[str, Callable[..., int]] = {
    "center": _width,
    "ljust": _width,
    "rjust": _width,
    "zfill": _width,
    "expandtabs": _expanded,
    "replace": _replaced,
    "translate": _translated,
    "to_bytes": _width,
}
"""Sizes of what methods of texts and numbers make, from the owner and the arguments."""


def _call(environment: Any, context: Any, thing: Any, /, *args: Any, **kwargs: Any) -> Any:
    owner = getattr(thing, "__self__", None)
    if isinstance(owner, str | bytes | int):
        name = str(getattr(thing, "__name__", ""))
        if name == "join" and args and isinstance(owner, str):
            pieces = [str(piece) for piece in args[0]] if not isinstance(args[0], str) else list(args[0])
            _check(sum(map(len, pieces)) + len(owner) * len(pieces))
        elif (size := _METHOD_SIZES.get(name)) is not None:
            _check(size(owner, *args, *kwargs.values()))
    return _call_unbounded[0](environment, context, thing, *args, **kwargs)


# --- filters --------------------------------------------------------------------------------------


def _indented(text: Any, width: Any = 4, *_: Any) -> int:
    text = str(text)
    each = width if isinstance(width, int) else _length(width)
    return len(text) + (text.count("\n") + 1) * (each + 1)


def _wrapped(text: Any, *others: Any) -> int:
    return _length(text) * (1 + max(map(_length, others), default=0))


def _formatted(form: Any, *values: Any, **named: Any) -> int:
    _check_format(str(form), named or values)
    return 0


def _summed(_: Any, *others: Any) -> int:
    """Refuse to add up lists, since each step copies all before it."""
    return ITEMS_MAX + 1 if any(isinstance(one, list | tuple) for one in others) else 0


_FILTER_SIZES: dict[str, Callable[..., int]] = {
    "center": _width,
    "indent": _indented,
    "batch": _width,
    "slice": _width,
    "replace": _replaced,
    "wordwrap": _wrapped,
    "format": _formatted,
    "sum": _summed,
}


def _bounded_filter(real: Callable[..., Any], size: Callable[..., int]) -> Callable[..., Any]:
    skipped = int(hasattr(real, "jinja_pass_arg"))

    @wraps(real)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if size is _formatted:
            _formatted(*args[skipped:], **kwargs)
        else:
            _check(size(*args[skipped:], *kwargs.values()))
        return real(*args, **kwargs)

    return bounded


def _from_string(real: Callable[..., Any]) -> Callable[..., Any]:
    """Bound the filter `tojson` when a template is compiled. transformers sets its own one before that."""

    @wraps(real)
    def from_string(environment: Any, *args: Any, **kwargs: Any) -> Any:
        environment.filters["tojson"] = _bounded_filter(environment.filters["tojson"], _as_json)
        return real(environment, *args, **kwargs)

    return from_string


def _as_json(_: Any, *options: Any) -> int:
    """Refuse an indentation or separators that are longer than anybody needs."""
    each = [part for one in options for part in (cast("Iterable[Any]", one) if _is_several(one) else (one,))]
    longest = max([0, *(one if isinstance(one, int) else _length(one) for one in each)])
    return 0 if longest <= INDENT_MAX else ITEMS_MAX + longest


def _is_several(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _join_filter(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def join(context: Any, value: Iterable[Any], d: Any = "", attribute: Any = None) -> Any:
        pieces = [str(real(context, [one], "", attribute)) for one in value]
        _check(sum(map(len, pieces)) + _length(d) * len(pieces))
        return str(d).join(pieces)

    return join
