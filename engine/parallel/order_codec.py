"""Orders as bytes, from one encoder to decoders that get all it wrote, in order.

Most items continue a sequence of the plan before: its sampling parameters are the same, and its block table
is the same or longer. Only what is new travels. Long block tables would otherwise cost milliseconds per step.
An item that decodes on, in the same blocks and at the same place of the plan, is its token alone.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec

from baton.core.ids import SeqKey, SequenceId
from baton.core.sampling import SamplingParams
from baton.core.steps import StepItem, StepPlan
from engine.parallel.orders import RankOrder, RareOrder

REMEMBERED_MAX = 8192
"""The sequences that both ends remember; the longest unused one is forgotten first, on both alike."""

_PLAN, _OTHER = b"p", b"o"
"""The first byte of an order: a step plan, or anything else."""


class _Rare(msgspec.Struct, frozen=True, array_like=True):
    """The fields of an item that most items leave as they are."""

    draft_count: int
    history: tuple[int, ...] | None
    want_drafts: int
    next_prompt_token: int | None
    adapter: str
    wants_embedding: bool


_NOTHING_RARE = _Rare(0, None, 0, None, "", False)


class _Item(msgspec.Struct, frozen=True, array_like=True):
    """One item beside what is remembered of its sequence."""

    seq_id: SequenceId
    epoch: int
    tokens: tuple[int, ...]
    first_position: int
    kept_block_count: int
    """So many blocks are the first ones of the table that is remembered."""
    new_block_ids: tuple[int, ...]
    sample_index: int | None
    prompt_token_count: int
    sampling: SamplingParams | None
    """None: as remembered."""
    rare: _Rare | None
    """None: nothing rare."""


class _Plan(msgspec.Struct, frozen=True, array_like=True):
    items: list[int | _Item]
    """A number is the token of an item that goes on from the one at the same place of the plan before."""
    step_number: int
    copies: tuple[tuple[int, int], ...]
    swap_out: tuple[tuple[int, int], ...]
    swap_in: tuple[tuple[int, int], ...]
    ended: list[tuple[SequenceId, int]]


class _Memory:
    """The newest item of each sequence, up to a number of sequences."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._items: dict[tuple[SequenceId, int], StepItem] = {}

    def take(self, key: tuple[SequenceId, int]) -> StepItem | None:
        return self._items.pop(key, None)

    def put(self, item: StepItem) -> None:
        self._items[item.key] = item
        if len(self._items) > self._size_max:
            del self._items[next(iter(self._items))]

    def put_all(self, items: Iterable[StepItem]) -> None:
        for item in items:
            self.put(item)

    def forget(self, keys: Iterable[tuple[SequenceId, int]]) -> None:
        for key in keys:
            self._items.pop(key, None)


class OrderEncoder:
    def __init__(self, *, remembered_max: int = REMEMBERED_MAX) -> None:
        self._memory = _Memory(remembered_max)
        self._before: tuple[StepItem, ...] = ()
        """Items of the plan before."""
        self._is_before_noted = True
        """Whether the memory has those items. A plan in which every item goes on leaves it as it is: most do,
        and the next one that does not brings it up to date."""
        self._write = msgspec.msgpack.Encoder().encode

    def encode(self, order: RankOrder) -> bytes:
        if not isinstance(order, StepPlan):
            return _OTHER + self._write(order)
        return _PLAN + self._plan(order)

    def _plan(self, plan: StepPlan) -> bytes:
        before, self._before = self._before, plan.items
        if _all_go_on(plan.items, before):
            items: list[int | _Item] = [item.tokens[0] for item in plan.items]
            self._memory.forget(plan.ended)
            self._is_before_noted = False
        else:
            items = self._changed(plan, before)
        ended = [(key.seq_id, key.epoch) for key in plan.ended]
        return self._write(_Plan(items, plan.step_number, plan.copies, plan.swap_out, plan.swap_in, ended))

    def _changed(self, plan: StepPlan, before: tuple[StepItem, ...]) -> list[int | _Item]:
        if not self._is_before_noted:
            self._memory.put_all(before)
            self._is_before_noted = True
        self._memory.forget(plan.ended)
        return [
            self._go_on(item) if old is not None and _goes_on(item, old) else self._shorten(item)
            for item, old in zip_longest(plan.items, before[: len(plan.items)])
        ]

    def _go_on(self, item: StepItem) -> int:
        self._memory.put(item)
        return item.tokens[0]

    def _shorten(self, item: StepItem) -> _Item:
        before = self._memory.take(item.key)
        self._memory.put(item)
        blocks, sampling, kept = item.block_ids, item.sampling, 0
        if before is not None:
            old = before.block_ids
            if old is blocks or blocks[: len(old)] == old:
                kept, blocks = len(old), blocks[len(old) :]
            same_sampling = before.sampling is sampling or before.sampling == sampling
        else:
            same_sampling = False
        return _Item(
            item.key[0],
            item.key[1],
            item.tokens,
            item.first_position,
            kept,
            blocks,
            item.sample_index,
            item.prompt_token_count,
            None if same_sampling else sampling,
            _rare_of(item),
        )


def _all_go_on(items: Sequence[StepItem], before: Sequence[StepItem]) -> bool:
    """Whether no sequence came, went, changed its place or did anything but decode one token."""
    return len(items) == len(before) and all(map(_goes_on, items, before))


def _goes_on(item: StepItem, before: StepItem) -> bool:
    """Whether the item is what `_next_of` makes of the one before and a token."""
    return (
        item.first_position == before.first_position + 1
        and len(item.tokens) == 1 == len(before.tokens)
        and item.sample_index is not None
        and before.sample_index is not None
        and item.sample_index == before.sample_index + 1
        and item.key == before.key
        and item.prompt_token_count == before.prompt_token_count
        and (item.block_ids is before.block_ids or item.block_ids == before.block_ids)
        and (item.sampling is before.sampling or item.sampling == before.sampling)
        and _is_plain(item)
        and item.adapter == before.adapter
    )


def _next_of(before: StepItem, token: int) -> StepItem:
    if before.sample_index is None:
        raise ValueError(f"a plan goes on from an item of {before.key} that did not sample")
    return StepItem(
        before.key,
        (token,),
        before.first_position + 1,
        before.block_ids,
        before.sample_index + 1,
        before.sampling,
        0,
        before.prompt_token_count,
        adapter=before.adapter,
    )


def _is_plain(item: StepItem) -> bool:
    """Whether nothing of the item is rare but perhaps its adapter."""
    is_alone = item.history is None and item.next_prompt_token is None
    return is_alone and not (item.draft_count or item.want_drafts or item.wants_embedding)


def _rare_of(item: StepItem) -> _Rare | None:
    if not item.adapter and _is_plain(item):
        return None
    return _Rare(
        *(item.draft_count, item.history, item.want_drafts),
        *(item.next_prompt_token, item.adapter, item.wants_embedding),
    )


class OrderDecoder:
    def __init__(self, *, remembered_max: int = REMEMBERED_MAX) -> None:
        self._memory = _Memory(remembered_max)
        self._before: tuple[StepItem, ...] = ()
        self._is_before_noted = True
        """As the encoder's."""
        self._read = msgspec.msgpack.Decoder(_Plan).decode
        self._read_other = msgspec.msgpack.Decoder(RareOrder).decode

    def decode(self, data: bytes | memoryview) -> RankOrder:
        """Raises msgspec.DecodeError or ValueError: these bytes are not what the encoder wrote next."""
        kind, rest = bytes(data[:1]), memoryview(data)[1:]
        if kind == _PLAN:
            return self._plan(self._read(rest))
        if kind == _OTHER:
            return self._read_other(rest)
        raise ValueError(f"an order begins with {kind!r}")

    def _plan(self, plan: _Plan) -> StepPlan:
        before = self._before
        tokens = [item for item in plan.items if isinstance(item, int)]
        if len(tokens) == len(plan.items) == len(before):
            self._before = tuple(map(_next_of, before, tokens))
            self._memory.forget(plan.ended)
            self._is_before_noted = False
        else:
            self._before = self._changed(plan, before)
        return StepPlan(
            self._before,
            plan.step_number,
            plan.copies,
            plan.swap_out,
            plan.swap_in,
            tuple([SeqKey(seq_id, epoch) for seq_id, epoch in plan.ended]),
        )

    def _changed(self, plan: _Plan, before: tuple[StepItem, ...]) -> tuple[StepItem, ...]:
        if not self._is_before_noted:
            self._memory.put_all(before)
            self._is_before_noted = True
        self._memory.forget(plan.ended)
        items: list[StepItem] = []
        for place, item in enumerate(plan.items):
            if isinstance(item, _Item):
                items.append(self._complete(item))
            elif place < len(before):
                items.append(self._go_on(before[place], item))
            else:
                raise ValueError(f"a plan goes on from place {place} of one with {len(before)} items")
        return tuple(items)

    def _go_on(self, before: StepItem, token: int) -> StepItem:
        item = _next_of(before, token)
        self._memory.put(item)
        return item

    def _complete(self, item: _Item) -> StepItem:
        before = self._memory.take((item.seq_id, item.epoch))
        rare, sampling, blocks = item.rare or _NOTHING_RARE, item.sampling, item.new_block_ids
        if before is None:
            if sampling is None or item.kept_block_count:
                raise ValueError(f"a plan continues {item.seq_id}@{item.epoch}, which is not known here")
            key = SeqKey(item.seq_id, item.epoch)
        else:
            key = before.key
            if sampling is None:
                sampling = before.sampling
            if item.kept_block_count:
                if item.kept_block_count != len(before.block_ids):
                    raise ValueError(f"a plan continues another block table of {key}")
                blocks = before.block_ids + blocks if blocks else before.block_ids
        whole = StepItem(
            key,
            item.tokens,
            item.first_position,
            blocks,
            item.sample_index,
            sampling,
            rare.draft_count,
            item.prompt_token_count,
            rare.history,
            rare.want_drafts,
            rare.next_prompt_token,
            rare.adapter,
            rare.wants_embedding,
        )
        self._memory.put(whole)
        return whole
