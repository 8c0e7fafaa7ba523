"""What expert groups and their callers decide, broken on purpose."""

from collections.abc import Iterator
from dataclasses import replace

from baton.core.experts import ExpertMapUpdate
from baton.core.ids import ExpertRankId
from control_plane.experts import group_values as v
from control_plane.experts.group import ExpertRankGroup
from control_plane.experts.group_callers import ExpertCallerBook
from control_plane.experts.group_ranks import ExpertRankBook, ExpertRankEntry
from control_plane.experts.rollout import ExpertRollout
from control_plane.experts.rollout_values import LoadExpert, LoadId
from control_plane.experts.values import ExpertMap
from engine.scheduling.expert_parking import ExpertParking
from engine.scheduling.expert_routes import ConnectExpertRank, ExpertRoutes, RouteAction
from simulator.faults.experts.callers import SimExpertCaller
from tests.simulator.mutant import Mutant, Patch


def _suspicions_are_ignored(patch: Patch) -> None:
    """A rank that does not answer callers stays in the map for as long as it may be silent."""
    patch.setattr(ExpertRankGroup, "_on_suspected", lambda *_: iter(()))


def _old_epochs_are_unused(patch: Patch) -> None:
    """An expert is dropped as soon as a newer map does not name it, whoever uses the older one."""
    patch.setattr(ExpertCallerBook, "lowest", property(lambda self: None))


def _maps_without_lost_ranks_are_not_sent(patch: Patch) -> None:
    """Callers do not hear of a map that names fewer ranks."""
    announce = ExpertRankGroup._announce
    ranks: dict[int, int] = {}

    def quiet(self: ExpertRankGroup, found: ExpertMap, now_s: float) -> Iterator[v.ExpertGroupAction]:
        before, ranks[id(self)] = ranks.get(id(self), 0), len(found.ranks)
        actions = list(announce(self, found, now_s))
        return iter(() if len(found.ranks) < before else actions)

    patch.setattr(ExpertRankGroup, "_announce", quiet)


def _links_keep_their_numbers(patch: Patch) -> None:
    """A connection that is made anew has the number of the one before, so that late results are taken."""
    fail = ExpertRoutes.on_failed

    def lenient(
        self: ExpertRoutes, rank_id: ExpertRankId, link: int, reason: str, *, is_gone: bool, now_s: float
    ) -> list[RouteAction]:
        actions = fail(self, rank_id, link, reason, is_gone=is_gone, now_s=now_s)
        route = self._routes.get(rank_id)
        if not actions or route is None:
            return actions
        route.link = link
        return [replace(one, link=link) if isinstance(one, ConnectExpertRank) else one for one in actions]

    patch.setattr(ExpertRoutes, "on_failed", lenient)


def _missing_experts_wait_their_turn(patch: Patch) -> None:
    """Experts that no rank holds are loaded within the limit for migrations."""
    patch.setattr(ExpertRollout, "_is_missing", lambda self, key: False)


def _epochs_are_not_reported(patch: Patch) -> None:
    """Callers do not say that they use older maps no more."""
    patch.setattr(ExpertRoutes, "_report_epoch", lambda self: [])


def _lost_ranks_stay_lost(patch: Patch) -> None:
    """The process of a rank that ended is not started again."""

    def exited(self: ExpertRankBook, entry: ExpertRankEntry, reason: str, *, now_s: float) -> None:
        self.entries.pop(entry.name)
        self.wanted -= not entry.is_leaving

    patch.setattr(ExpertRankBook, "exited", exited)


def _maps_name_what_is_being_loaded(patch: Patch) -> None:
    """An expert is in the map from the order to load it."""
    start = ExpertRollout._start

    def early(self: ExpertRollout, wanted, source, now_s: float) -> LoadExpert:
        load = start(self, wanted, source, now_s)
        self._hold(wanted.rank, wanted.key)
        return load

    patch.setattr(ExpertRollout, "_start", early)


def _epochs_begin_anew(patch: Patch) -> None:
    """A control plane that begins anew counts epochs from 1, and believes that callers follow."""
    hello = ExpertCallerBook.hello

    def forgetful(self: ExpertCallerBook, caller: str, stream: int, epoch: int) -> bool:
        hello(self, caller, stream, epoch)
        self.highest = 0
        return True

    patch.setattr(ExpertCallerBook, "hello", forgetful)


def _failed_loads_are_forgotten(patch: Patch) -> None:
    """A load that failed is not tried again."""

    def fail(self: ExpertRollout, load_id: LoadId, now_s: float, *, least_s: float = 0.0) -> None:
        if (load := self._ended(load_id)) is not None:
            self._free[load.wanted.rank] += 1

    patch.setattr(ExpertRollout, "_fail", fail)


def _unconnected_ranks_get_rows(patch: Patch) -> None:
    """A rank gets rows from the moment that a map names it."""
    take = ExpertRoutes.on_map

    def eager(self: ExpertRoutes, update: ExpertMapUpdate, *, now_s: float) -> list[RouteAction]:
        actions = take(self, update, now_s=now_s)
        kept = [route for route in self._routes.values() if not route.is_connected]
        for route in kept:
            route.is_connected = True
        self._make_table()
        for route in kept:
            route.is_connected = False
        return actions

    patch.setattr(ExpertRoutes, "on_map", eager)


def _leaving_ranks_are_ended_at_once(patch: Patch) -> None:
    """A rank that is drained ends before others have its experts."""
    patch.setattr(ExpertRollout, "needs", lambda self, rank: False)


def _callers_are_never_parked(patch: Patch) -> None:
    """A caller whose rows no rank can take says nothing of it."""
    patch.setattr(ExpertParking, "look", lambda self, **_: False)


def _parked_callers_stay_so(patch: Patch) -> None:
    """A caller that was parked once takes no new sequences any more."""
    look = ExpertParking.look

    def sticky(self: ExpertParking, *, has_ranks: bool, is_complete: bool, now_s: float) -> bool:
        was_parked = self.is_parked
        has_changed = look(self, has_ranks=has_ranks, is_complete=is_complete, now_s=now_s)
        self.is_parked |= was_parked
        return has_changed and not was_parked

    patch.setattr(ExpertParking, "look", sticky)


def _waiting_rows_are_forgotten(patch: Patch) -> None:
    """Rows of a caller without any rank are not sent when ranks are back."""

    def serve(self: SimExpertCaller) -> None:
        for dispatch in list(self.dispatches.values()):
            if dispatch.unserved and not self.parking.is_parked:
                self._serve(dispatch)

    patch.setattr(SimExpertCaller, "_serve_waiting", serve)


def _connections_are_made_once(patch: Patch) -> None:
    """A rank whose connection ends counts as gone, without an attempt to make it anew."""
    fail, suspect = ExpertRoutes.on_failed, ExpertRoutes._suspect

    def hasty(
        self: ExpertRoutes, rank_id: ExpertRankId, link: int, reason: str, *, is_gone: bool, now_s: float
    ) -> list[RouteAction]:
        if (route := self._routes.get(rank_id)) is not None:
            route.retried_s = now_s
        actions = fail(self, rank_id, link, reason, is_gone=is_gone, now_s=now_s)
        if actions and is_gone and route is not None:
            actions[-1] = suspect(self, route, is_gone=True, reason=reason, now_s=now_s)
        return actions

    patch.setattr(ExpertRoutes, "on_failed", hasty)


MUTANTS = (
    Mutant("suspicions are ignored", _suspicions_are_ignored, {16}),
    Mutant("experts are dropped in use", _old_epochs_are_unused, {17}),
    Mutant("maps of losses are not sent", _maps_without_lost_ranks_are_not_sent, {16, 17}),
    Mutant("links keep their numbers", _links_keep_their_numbers, {0, 15, 16, 17}),
    Mutant("missing experts wait their turn", _missing_experts_wait_their_turn, {16}),
    Mutant("epochs in use are not reported", _epochs_are_not_reported, {16}),
    Mutant("lost ranks stay lost", _lost_ranks_stay_lost, {16}),
    Mutant("maps name what is being loaded", _maps_name_what_is_being_loaded, {0, 17}),
    Mutant("epochs begin anew", _epochs_begin_anew, {16, 17}),
    Mutant("failed loads are forgotten", _failed_loads_are_forgotten, {16}),
    Mutant("unconnected ranks get rows", _unconnected_ranks_get_rows, {0}),
    Mutant("leaving ranks end at once", _leaving_ranks_are_ended_at_once, {0, 16, 17}),
    Mutant("connections are made once", _connections_are_made_once, {16}),
    Mutant("waiting callers are not parked", _callers_are_never_parked, {16}),
    Mutant("parked callers stay so", _parked_callers_stay_so, {16}),
    Mutant("rows of parked callers stay", _waiting_rows_are_forgotten, {16, 17}),
)
