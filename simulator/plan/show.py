"""The result of a search, as a table and as JSON."""

from dataclasses import asdict, dataclass

from rich.table import Table

from baton.files.terminal import new_console
from simulator.plan.clusters import ClusterPlan, ClusterVerdict
from simulator.plan.search import Found, Tried
from simulator.plan.shapes import PlanObjectives


@dataclass(frozen=True, slots=True)
class PlanResult:
    model: str
    rate: float
    headroom: float
    """Headroom asked for."""
    reached: float | None
    """Multiple of the rate that the cheapest still serves, as far as was looked."""
    objectives: PlanObjectives
    found: Found

    @property
    def purpose(self) -> str:
        wanted = self.objectives
        return (
            f"{self.model} at {self.rate:.3g} requests/s times {self.headroom:g}: TTFT {wanted.ttft_s:g} s "
            f"and TPOT {wanted.tpot_s:g} s for {wanted.attain:.0%} of requests"
        )

    def as_json(self) -> dict[str, object]:
        found = self.found
        return {
            "model": self.model,
            "rate_per_s": self.rate,
            "rate_simulated_per_s": self.rate * self.headroom,
            "headroom_asked": self.headroom,
            "headroom_reached": self.reached,
            "objectives": asdict(self.objectives),
            "cheapest": None if found.best is None else _as_json(found.best),
            "is_complete": found.is_complete,
            "runner_up": None if found.runner_up is None else _as_json(found.runner_up),
            "tried": [_as_json(one) for one in found.tried],
            "not_tried": [{"kind": k.name, "price_at_least": k.least_price} for k in found.left_out],
        }


def _as_json(one: Tried) -> dict[str, object]:
    cluster, verdict = one.plan, one.verdict
    pools = {
        role.value: {
            "replicas": pool.count,
            "gpu": pool.shape.node.gpu.name,
            "tensor": pool.shape.node.tensor,
            "pipeline": pool.shape.node.pipeline,
        }
        for role, pool in cluster.pools.items()
    }
    return {
        "price_per_hour": cluster.price_per_hour,
        "gpus": cluster.gpu_count,
        "pools": pools,
        "passed": one.passed,
        "aborted": verdict.aborted,
        "met": None if verdict.aborted else verdict.met,
        "met_at_most": verdict.met,
    }


def words(cluster: ClusterPlan) -> str:
    pools = (f"{role.value} {pool.count} of {pool.shape.name}" for role, pool in cluster.pools.items())
    return f"${cluster.price_per_hour:.2f}/h, {cluster.gpu_count} GPUs: " + ", ".join(pools)


def share_of(verdict: ClusterVerdict) -> str:
    """Return the share as text; of a run that was given up only a bound is known."""
    return f"<= {verdict.met:.1%}" if verdict.aborted else f"{verdict.met:.1%}"


def show(done: PlanResult) -> None:
    if done.found.best is None:
        _show_nothing(done)
        return
    console = new_console()
    table = Table(title=done.purpose, title_justify="left")
    for name in ("", "pool", "replicas", "shape", "$/hour", "met"):
        table.add_column(name, justify="right" if name in ("replicas", "$/hour", "met") else "left")
    for title, one in (("cheapest", done.found.best), ("runner-up", done.found.runner_up)):
        if one is None:
            continue
        for role, pool in one.plan.pools.items():
            price = f"{pool.price_per_hour:.2f}"
            table.add_row(title, role.value, str(pool.count), pool.shape.name, price)
        price = f"{one.plan.price_per_hour:.2f}"
        met = share_of(one.verdict)
        table.add_row("", "", "", "[bold]together[/bold]", price, met, end_section=True)
    console.print(table)
    console.print(f"The cheapest still serves {done.reached:g} times the rate in the simulator.")
    console.print(_how_sure(done.found))
    if any(pool.shape.node.gpu_count > 1 for pool in done.found.best.plan.pools.values()):
        console.print(
            "Note: workers of several ranks have not run on GPUs yet. --tensor 1 --pipeline 1 plans without "
            "them."
        )


def _how_sure(found: Found) -> str:
    given_up = sum(one.verdict.aborted for one in found.tried)
    tried = f"{len(found.tried)} clusters simulated, {given_up} of them given up early"
    if not found.is_complete:
        return (
            f"{tried}. The search is not complete: cheaper clusters are left that were not looked at. Raise "
            "--simulations."
        )
    skipped = len(found.left_out)
    beside = f" ({skipped} of the kinds by the work alone, without simulating any)" if skipped else ""
    return f"{tried}. None that is cheaper serves the trace{beside}."


def _show_nothing(done: PlanResult) -> None:
    console = new_console()
    console.print(f"[bold]Nothing that was tried serves[/bold] {done.purpose}.")
    if done.found.tried:
        nearest = max((one.verdict for one in done.found.tried), key=lambda v: v.so_far)
        at_most = "at most " if nearest.aborted else ""
        met, ttft_met, tpot_met = (f"{share:.0%}" for share in nearest[:3])
        console.print(
            f"At best {at_most}{met} met both objectives, {ttft_met} that of TTFT, {tpot_met} that of TPOT. "
            "Where more replicas change nothing, one of them is too slow."
        )
    else:
        console.print("No shape serves enough requests in time even with nobody beside them.")
    console.print("Raise --simulations, loosen the objectives, or offer other GPUs or widths.")
