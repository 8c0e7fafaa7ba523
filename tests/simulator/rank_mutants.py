"""What workers of several ranks decide, broken on purpose."""

import dataclasses
from collections.abc import Callable, Sequence

import msgspec

from baton.core.ids import ReadId
from baton.core.messages import KVPart
from engine.model_files.division import Division
from engine.parallel.order_codec import OrderDecoder
from engine.parallel.team_state import TeamState
from kv_transfer import part_plan
from kv_transfer.layout import Places
from kv_transfer.part_copies import PartCopies
from kv_transfer.part_plan import PartLink
from kv_transfer.read import ReadDone
from simulator.faults.memory import WHOLE
from tests.simulator.mutant import Mutant, Patch


def _links_broken(patch: Patch, change: Callable[[list[PartLink]], list[PartLink]]) -> None:
    links = part_plan.part_links
    patch.setattr(part_plan, "part_links", lambda whole, local, sources: change(links(whole, local, sources)))


def _a_part_is_not_read(patch: Patch) -> None:
    """The last of several parts that a block needs is left out."""
    _links_broken(patch, lambda links: links[:-1] or links)


def _first_source_only(patch: Patch) -> None:
    """Every part is read from the owner's first rank."""
    _links_broken(patch, lambda links: [link._replace(source_part=0) for link in links])


def _first_generations_count(patch: Patch) -> None:
    """Generations that differ at another source than the first are overlooked."""
    merged = part_plan.merged

    def lenient(read_id: ReadId, parts: Sequence[ReadDone]) -> ReadDone:
        later = [
            msgspec.structs.replace(done, error="", is_stale=False) if done.is_stale else done
            for done in parts[1:]
        ]
        return merged(read_id, [parts[0], *later])

    patch.setattr(part_plan, "merged", lenient)


def _only_errors_of_all_count(patch: Patch) -> None:
    """A sequence joins when one of its parts has arrived."""
    merged = part_plan.merged

    def lenient(read_id: ReadId, parts: Sequence[ReadDone]) -> ReadDone:
        whole = merged(read_id, parts)
        good = [done for done in parts if not done.error]
        return msgspec.structs.replace(whole, error="", is_stale=False) if good else whole

    patch.setattr(part_plan, "merged", lenient)


def _settled_with_the_first_part(patch: Patch) -> None:
    """A read has settled when one of its parts has."""
    merged = part_plan.merged

    def hasty(read_id: ReadId, parts: Sequence[ReadDone]) -> ReadDone:
        settled = any(done.is_settled for done in parts)
        return msgspec.structs.replace(merged(read_id, parts), is_settled=settled)

    patch.setattr(part_plan, "merged", hasty)


def _shape_of_another(patch: Patch) -> None:
    """An owner's parts are taken for those of tensor ranks, whatever its shape."""
    places_of = part_plan.places_of

    def mistaken(whole: object, parts: Sequence[KVPart]) -> list[Places]:
        found = places_of(whole, parts)
        if len(found) < 2:
            return found
        layers, heads = WHOLE[0]
        size = max(1, len(heads) // len(found))
        firsts = [rank * size % len(heads) for rank in range(len(found))]
        return [Places(layers, range(first, first + size)) for first in firsts]

    patch.setattr(part_plan, "places_of", mistaken)


def _ranges_by_the_part(patch: Patch) -> None:
    """Places within a part are counted as if it were the whole model."""

    def unranged(whole: object, local: Sequence[Places], sources: Sequence[Places]) -> list[PartLink]:
        return [
            link._replace(
                ranges=tuple(piece._replace(local=min(piece.local, piece.source)) for piece in link.ranges)
            )
            for link in links(whole, local, sources)
        ]

    links = part_plan.part_links
    patch.setattr(part_plan, "part_links", unranged)


def _store_forgets_a_part(patch: Patch) -> None:
    """A block that is loaded from the store reaches all ranks but the last."""
    scatter = PartCopies.scatter

    def incomplete(self: PartCopies, whole_row: int, row: int) -> None:
        pairs = self._pairs
        self._pairs = pairs[:-1]
        scatter(self, whole_row, row)
        self._pairs = pairs

    patch.setattr(PartCopies, "scatter", incomplete)


def _store_is_written_in_part(patch: Patch) -> None:
    """A block that is written to the store has the bytes of the first rank only."""
    gather = PartCopies.gather

    def incomplete(self: PartCopies, row: int, whole_row: int) -> None:
        pairs = self._pairs
        self._pairs = pairs[:1]
        gather(self, row, whole_row)
        self._pairs = pairs

    patch.setattr(PartCopies, "gather", incomplete)


def _lost_rank_is_not_told(patch: Patch) -> None:
    """The leader goes on as if nothing were when a follower is lost."""
    patch.setattr(TeamState, "ended", lambda self, reason: False)


def _missing_rank(patch: Patch) -> None:
    """A worker is announced when all followers but one are ready."""
    patch.setattr(TeamState, "is_ready", property(lambda self: len(self.late) <= 1))


def _heads_of_the_first_rank(patch: Patch) -> None:
    """Every tensor rank takes the key-value heads of the first one."""
    kv_heads = Division.kv_heads
    patch.setattr(Division, "kv_heads", lambda self: kv_heads(dataclasses.replace(self, rank=0)))


def _old_block_tables(patch: Patch) -> None:
    """Followers keep the block table that a sequence began with."""
    complete = OrderDecoder._complete

    def stale(self: OrderDecoder, item: object) -> object:
        whole = complete(self, item)
        count = item.kept_block_count
        if not count or len(whole.block_ids) == count:
            return whole
        return msgspec.structs.replace(
            whole, block_ids=whole.block_ids[:count] + whole.block_ids[:1] * (len(whole.block_ids) - count)
        )

    patch.setattr(OrderDecoder, "_complete", stale)


MUTANTS = (
    Mutant("a part is not read", _a_part_is_not_read, {2, 4, 7}),
    Mutant("parts are read from the first rank", _first_source_only, {2, 4, 7}),
    Mutant("generations are compared at the first source", _first_generations_count, {2, 4, 7}),
    Mutant("one part is enough to join", _only_errors_of_all_count, {2, 4, 7}),
    Mutant("a read settles with its first part", _settled_with_the_first_part, {0, 2, 4, 7}),
    Mutant("a shape is taken for another", _shape_of_another, {0, 2, 4, 7}),
    Mutant("a part's places are those of the source", _ranges_by_the_part, {0, 2, 4, 7}),
    Mutant("a load from the store forgets a rank", _store_forgets_a_part, {2, 7}),
    Mutant("the store is given one rank's part", _store_is_written_in_part, {2, 7}),
    Mutant("a lost rank is not told", _lost_rank_is_not_told, {6}),
    Mutant("a worker starts with a rank missing", _missing_rank, {9}),
    Mutant("all ranks take the first one's heads", _heads_of_the_first_rank, {4}),
    Mutant("followers keep old block tables", _old_block_tables, {0, 2, 7}),
)
