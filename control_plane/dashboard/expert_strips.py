"""The load of experts as HTML: bars for all workers together, a strip of colours for each. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from control_plane.dashboard.experts import ExpertGroup, ExpertRow
from control_plane.dashboard.markup import empty
from control_plane.dashboard.text import NOTHING, h, number, plural, share

BOUNDS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Borders between colours, in multiples of an even share."""

KEYS = ("< ¼", "½", "", "even", "", "2", "> 4 × an even share")
"""Legend of the colours, from idle to busy."""

ROWS_MAX = 5
"""Most workers of a model in the overview."""

BUSIEST = 3
Cell = TypeVar("Cell")

APART_MAX = 64
"""Most experts that are drawn with gaps between them."""

BALANCE = (
    "tokens per expert of a layer, the mean over the busiest's; mean over layers. 100 % is even, "
    "{least} means that all go to one of {count}"
)


def legend() -> list[tuple[str, str, str]]:
    """Return the legend for `markup.keys`."""
    return [(name, f"e{number}", "area") for number, name in enumerate(KEYS)]


def expert_balance(groups: Sequence[ExpertGroup]) -> str:
    """Return the balance of each model as a whole and of its workers."""
    return "".join(_group(group, with_model=len(groups) > 1) for group in groups)


def worker_experts(row: ExpertRow) -> str:
    """Return the load of the experts of one worker."""
    return _frame(len(row.tokens), [_row(row, _bars(row))])


def _group(group: ExpertGroup, *, with_model: bool) -> str:
    shown = group.workers[:ROWS_MAX]
    rows = [_row(group.total, _bars(group.total))]
    rows += [_row(worker, _strip(worker)) for worker in shown]
    left_out = len(group.workers) - len(shown)
    note = f"; {plural(left_out, 'worker')} with better balance not shown" if left_out else ""
    title = f"<h3>{h(group.model)}</h3>" if with_model else ""
    return title + _frame(group.expert_count, rows, note)


def _frame(expert_count: int, rows: Iterable[str], note: str = "") -> str:
    least = share(1 / max(1, expert_count))
    head = (
        f"<span></span><span class=ends><i>0</i><i>experts</i><i>{expert_count - 1}</i></span>"
        "<span class=n>balance</span><span class=n>worst layer</span><span>busiest, of an even share</span>"
    )
    said = f"Balance: {BALANCE.format(least=least, count=expert_count)}{note}."
    return f'<div class="experts">{head}{"".join(rows)}<p>{h(said)}</p></div>'


def _row(row: ExpertRow, drawing: str) -> str:
    busiest = ", ".join(f"#{expert} {number(times, digits=2)}×" for expert, times in row.busiest[:BUSIEST])
    return (
        f"<span class=nowrap>{h(row.name)}</span>{drawing}<strong class=n>{h(share(row.balance))}</strong>"
        f"<span class=n>{h(share(row.worst))}</span><span class=nowrap>{h(busiest or NOTHING)}</span>"
    )


def _strip(row: ExpertRow) -> str:
    """Draw a cell for each expert, coloured by its load."""
    cells = [bisect_right(BOUNDS, times) for times in row.shares]
    if not cells:
        return empty("No token was routed in the last five minutes.")
    width = _width(len(cells))
    paths: dict[int, str] = {}
    for color, begin, count in runs(cells):
        each = [(begin, count)] if width == 1 else [(begin + i, width) for i in range(count)]
        paths[color] = paths.get(color, "") + "".join(f"M{at} 0h{wide}v1h-{wide}z" for at, wide in each)
    return _svg(len(cells), 1, "strip", paths, _label(row, len(cells)))


def _bars(row: ExpertRow) -> str:
    """Draw a bar for each expert, and a line across at an even share."""
    if not row.shares:
        return empty("No token was routed in the last five minutes.")
    return bars(row.shares, _label(row, len(row.shares)))


def bars(shares: Sequence[float], label: str) -> str:
    """Draw a bar for each share, given in multiples of an even one, and a line across at an even share."""
    top = max(2.0, *shares)
    width, paths = _width(len(shares)), dict[int, str]()
    for expert, times in enumerate(shares):
        high, color = round(100 * times / top, 1), bisect_right(BOUNDS, times)
        paths[color] = paths.get(color, "") + f"M{expert} 100v-{high}h{width}v{high}z"
    even = f'<path class="even" d="M0 {100 - 100 / top:.1f}H{len(shares)}"/>'
    return _svg(len(shares), 100, "bars", paths, label, even)


def runs(cells: Sequence[Cell]) -> Iterator[tuple[Cell, int, int]]:
    """Yield runs of equal values as (value, first, count)."""
    at = 0
    for value, same in groupby(cells):
        count = len(list(same))
        yield value, at, count
        at += count


def _width(count: int) -> float:
    """Return the width of an expert's mark, within a cell of width 1."""
    return 0.94 if count <= APART_MAX else 1


def _label(row: ExpertRow, count: int) -> str:
    said = ", ".join(f"expert {e}: {number(times, digits=2)}" for e, times in row.busiest[:BUSIEST])
    return f"{row.name}, load of {count} experts; times an even share, {said}"


def _svg(wide: int, high: int, kind: str, paths: dict[int, str], label: str, more: str = "") -> str:
    drawn = "".join(f'<path style="fill:var(--e{color})" d="{d}"/>' for color, d in sorted(paths.items()))
    return (
        f'<svg class="{kind}" viewBox="0 0 {wide} {high}" preserveAspectRatio="none" role="img" '
        f'aria-label="{h(label)}">{drawn}{more}</svg>'
    )
