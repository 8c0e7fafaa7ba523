"""Numbers: bounds and steps in the form in which xgrammar enforces them. Pure.

xgrammar (0.2.8) ignores `multipleOf` for numbers and beside bounds, refuses bounds of an integer that are not
whole or exceed 64 bits, and writes a bounded number with six digits after the point at most.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any

from engine.structured.refusal import refuse

MULTIPLE_OF_MAX = 1024
"""The automaton of a step has a state for each remainder."""
MULTIPLES_MAX = 1024
"""Multiples between two bounds are listed one by one."""
INTEGER_MAX = 2**63 - 1
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
EXCLUSIVE_MAX = 2**32
"""Largest exclusive bound. Beyond it a double cannot tell the bound from the next number of six decimals."""
_DIGITS = Decimal("0.000001")
Schema = dict[str, Any]


def check_numbers(schema: Schema, kinds: list[str], path: str) -> None:
    """Rewrite bounds, step and `kinds` in place, so that all of them are enforced. Raises ClientError."""
    check_bounds(schema, path)
    if "number" in kinds:
        kinds[:] = [kind for kind in kinds if kind != "integer"]
    if "multipleOf" in schema:
        _check_step(schema, kinds, path)
    if "integer" in kinds:
        _check_integer_bounds(schema, path)
    elif any(keyword in schema for keyword in BOUNDS):
        _check_number_bounds(schema, path)


def listed_multiples(schema: Schema, path: str) -> list[int] | None:
    """The multiples of `multipleOf` between the bounds, or None where there is no step beside bounds.

    `schema` is one that `check_numbers` has rewritten. Raises ClientError for a range that is open or too
    long.
    """
    step = schema.get("multipleOf")
    if step is None or not schema.keys() & {"minimum", "maximum"}:
        return None
    if not {"minimum", "maximum"} <= schema.keys():
        given = "minimum" if "minimum" in schema else "maximum"
        raise refuse(
            path, "multipleOf", f"cannot be enforced beside {given} alone; give both bounds or leave both out"
        )
    first = -(-schema["minimum"] // step)
    last = schema["maximum"] // step
    if last - first >= MULTIPLES_MAX:
        raise refuse(
            path, "multipleOf", f"allows more than {MULTIPLES_MAX} values between the bounds; narrow them or "
            "leave them out",
        )  # fmt: skip
    if last < first:
        raise refuse(path, "multipleOf", "allows no value between the bounds")
    return [step * factor for factor in range(first, last + 1)]


def allows_number(schema: Schema, value: float) -> bool:
    """Whether a listed number keeps the bounds and the step that stand beside the list."""
    step = schema.get("multipleOf")
    return (
        math.isfinite(value)
        and ("minimum" not in schema or value >= schema["minimum"])
        and ("maximum" not in schema or value <= schema["maximum"])
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
        and (step is None or Fraction(str(value)) % Fraction(str(step)) == 0)
    )


def check_bounds(schema: Schema, path: str) -> None:
    for keyword in BOUNDS:
        value = schema.get(keyword, 0)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise refuse(path, keyword, "must be a number")


def check_step(schema: Schema, path: str) -> None:
    step = schema.get("multipleOf", 1)
    if type(step) not in (int, float) or not math.isfinite(step) or step <= 0:
        raise refuse(path, "multipleOf", "must be a number above 0")


def _check_step(schema: Schema, kinds: list[str], path: str) -> None:
    check_step(schema, path)
    step = schema["multipleOf"]
    if step != int(step):
        raise refuse(path, "multipleOf", f"is enforced for whole numbers only, and {step!r} is none")
    # A multiple of a whole number is whole, so a number with a whole step is an integer.
    kinds[:] = ["integer" if kind == "number" else kind for kind in kinds]
    schema["multipleOf"] = int(step)
    if step == 1:
        del schema["multipleOf"]
    elif step > MULTIPLE_OF_MAX and not schema.keys() & set(BOUNDS):
        raise refuse(
            path, "multipleOf", f"is enforced up to {MULTIPLE_OF_MAX}; beyond that give minimum and maximum"
        )


def _check_integer_bounds(schema: Schema, path: str) -> None:
    """Write the bounds as whole numbers that are themselves allowed."""
    lows = [math.ceil(schema["minimum"])] if "minimum" in schema else []
    highs = [math.floor(schema["maximum"])] if "maximum" in schema else []
    if "exclusiveMinimum" in schema:
        lows.append(math.floor(schema.pop("exclusiveMinimum")) + 1)
    if "exclusiveMaximum" in schema:
        highs.append(math.ceil(schema.pop("exclusiveMaximum")) - 1)
    for keyword, bounds, pick in (("minimum", lows, max), ("maximum", highs, min)):
        if bounds:
            schema[keyword] = pick(bounds)
            if abs(schema[keyword]) > INTEGER_MAX:
                raise refuse(path, keyword, "must fit into 64 bits for an integer")
    if lows and highs and schema["minimum"] > schema["maximum"]:
        raise refuse(path, "minimum", "leaves no integer below the maximum")


def _check_number_bounds(schema: Schema, path: str) -> None:
    """Refuse a range that holds no number of six digits after the point, since no text would end."""
    for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
        if abs(schema.get(keyword, 0)) > EXCLUSIVE_MAX:
            raise refuse(path, keyword, f"is enforced up to {EXCLUSIVE_MAX} only; use an inclusive bound")
    low = max(
        (
            _lowest(schema[k], is_exclusive=k != "minimum")
            for k in ("minimum", "exclusiveMinimum")
            if k in schema
        ),
        default=None,
    )
    high = min(
        (
            -_lowest(-schema[k], is_exclusive=k != "maximum")
            for k in ("maximum", "exclusiveMaximum")
            if k in schema
        ),
        default=None,
    )
    if low is not None and high is not None and low > high:
        keyword = next(k for k in ("minimum", "exclusiveMinimum") if k in schema)
        raise refuse(path, keyword, "leaves no number of six digits after the point below the maximum")


def _lowest(bound: float, *, is_exclusive: bool) -> Decimal:
    """The lowest number of six digits after the point that is not below (or, if exclusive, above) `bound`."""
    exact = Decimal(str(bound))
    if exact.adjusted() > 20:  # Far beyond the digits that count, and beyond what quantising can hold.
        return exact
    lowest = exact.quantize(_DIGITS, rounding=ROUND_CEILING)
    if is_exclusive and lowest == exact:
        lowest += _DIGITS
    assert lowest >= exact.quantize(_DIGITS, rounding=ROUND_FLOOR)
    return lowest
