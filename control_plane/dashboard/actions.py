"""Orders from the dashboard. Each is confirmed in a dialog before it is given, and may be tried as a dry
run."""

from collections.abc import Callable
from typing import Any

from nicegui import ui
from nicegui.elements.mixins.value_element import ValueElement

from baton.core.experts import ExpertGroupState, ExpertRankStatus
from baton.core.messages import Role
from baton.core.operate import (
    Action,
    ClusterState,
    Decision,
    DrainExpertRank,
    DrainNode,
    DrainWorker,
    NodeState,
    Order,
    Outcome,
    RebalanceExperts,
    ReplicaStatus,
    Scale,
    ScaleExperts,
    SwitchRole,
)
from baton.wire.link import LinkBroken
from control_plane.dashboard.shell import Shell, button
from control_plane.dashboard.text import h
from control_plane.order_impact import impact_of

REASON_MAX = 200
COUNT_MAX = 1024
GOOD = (Outcome.ACCEPTED, Outcome.DONE, Outcome.ADVISED)


class OrderDialog:
    """A dialog that confirms one order. Escape or Cancel leaves everything unchanged."""

    def __init__(self, shell: Shell, title: str, text: str, *, verb: str, is_harsh: bool = False) -> None:
        self._shell = shell
        self._action: Callable[[], Action] | None = None
        with ui.dialog() as self._dialog, ui.element("div").classes("ask").props("role=document"):
            ui.html(f"<h2>{h(title)}</h2><p>{h(text)}</p>", sanitize=False)
            self.fields = ui.element("div")
            self._reason = ui.input("Reason (kept in the log)").props(
                f"outlined dense maxlength={REASON_MAX}"
            )
            self.dry = ui.checkbox("Dry run: show what would happen, change nothing")
            self._impact = ui.html("", sanitize=False)
            self._answer = ui.html("", sanitize=False)
            with ui.element("div").classes("end"):
                self._cancel = button("Cancel", self._dialog.close)
                self._confirm = button(verb, self.send, kind="danger" if is_harsh else "primary")
        self._dialog.on("hide", self._dialog.delete)
        if not shell.may_operate:
            self._confirm.props["disabled"] = True
            self._answer.set_content(
                '<div class="answer">Your token allows viewing only; sign in with one of scope operate.</div>'
            )

    def open(self, action: Callable[[], Action], *choices: ValueElement[Any]) -> "OrderDialog":
        """Open the dialog. `action` returns the action to order once it is confirmed. Its impact is shown,
        and updated whenever one of the `choices` changes."""
        self._action = action
        for choice in choices:
            choice.on_value_change(self._show_impact)
        self._show_impact()
        self._dialog.open()
        return self

    def _show_impact(self) -> None:
        state = self._shell.dash.collector.state
        assert self._action is not None
        impact = impact_of(self._action(), state) if state is not None else None
        self._impact.set_content(
            "" if impact is None else f'<div class="answer bad" role="alert">{h(impact.text)}</div>'
        )

    async def send(self) -> None:
        """Give the confirmed order."""
        assert self._action is not None
        if not self._shell.may_operate:
            self._show("Your token allows viewing only; sign in with one of scope operate.", is_good=False)
            return
        who, reason = f"dashboard {self._shell.session.name}", str(self._reason.value or "")[:REASON_MAX]
        order = Order(self._action(), who, reason, is_advice=bool(self.dry.value))
        try:
            decision = await self._shell.dash.collector.order(order)
        except LinkBroken as error:
            self._show(f"The order did not reach the control plane; try again: {error}", is_good=False)
            return
        self._show_decision(decision)

    def _show_decision(self, decision: Decision) -> None:
        self._show(
            f"#{decision.number} {decision.outcome}: {decision.text}", is_good=decision.outcome in GOOD
        )
        if decision.outcome in (Outcome.ACCEPTED, Outcome.DONE):
            self._confirm.props["disabled"] = True
            self._confirm.update()

    def _show(self, text: str, *, is_good: bool) -> None:
        kind = "good" if is_good else "bad"
        self._answer.set_content(f'<div class="answer {kind}" role="status">{h(text)}</div>')


def ask_drain(shell: Shell, replica: ReplicaStatus) -> OrderDialog:
    text = "The worker gets no new requests, finishes or hands over those it has, and ends."
    ask = OrderDialog(shell, f"Drain {replica.name}?", text, verb="Drain", is_harsh=True)
    with ask.fields:
        replaced = ui.checkbox("Start a replacement", value=True)
    return ask.open(lambda: DrainWorker(replica.name, is_replaced=bool(replaced.value)), replaced)


def ask_switch(shell: Shell, replica: ReplicaStatus) -> OrderDialog:
    others = [role.value for role in Role if role is not replica.role]
    text = (
        f"The worker finishes its requests, then leaves the {replica.role} role for a new one. "
        "Its weights stay loaded."
    )
    ask = OrderDialog(shell, f"Switch the role of {replica.name}?", text, verb="Switch role")
    with ask.fields:
        role = ui.select(others, value=others[0], label="New role").props("outlined dense")
    return ask.open(lambda: SwitchRole(replica.name, Role(str(role.value))), role)


def ask_scale(shell: Shell, state: ClusterState, role: Role = Role.DECODE) -> OrderDialog:
    """Open the dialog for the size of a pool. `role` is selected at first."""
    models = [pool.model for pool in state.pools]
    roles = [role.value for role in Role]
    ask = OrderDialog(shell, "Scale a pool?", "Set the number of workers of a role.", verb="Scale")
    with ask.fields, ui.element("div").style("display: flex; flex-direction: column; gap: 12px"):
        model = ui.select(models, value=models[0] if models else None, label="Model").props("outlined dense")
        chosen = ui.select(roles, value=role.value, label="Role").props("outlined dense")
        count = ui.number("Workers", value=0, min=0, max=COUNT_MAX, precision=0).props("outlined dense")

    def wanted() -> int:
        pool = state.pool(str(model.value))
        return pool.count(Role(str(chosen.value))) if pool is not None else 0

    def follow() -> None:
        count.set_value(wanted())

    chosen.on_value_change(follow)
    model.on_value_change(follow)
    follow()

    def action() -> Action:
        return Scale(Role(str(chosen.value)), int(count.value or 0), str(model.value or ""))

    return ask.open(action, model, chosen, count)


def ask_node(shell: Shell, node: NodeState) -> OrderDialog:
    name = node.host or node.node[:12]
    if node.is_drained:
        ask = OrderDialog(
            shell, f"Use node {name} again?", "Workers may be placed on the node again.", verb="Use again"
        )
    else:
        text = (
            "All workers of the node are drained and started elsewhere; no worker is placed on it any more."
        )
        ask = OrderDialog(shell, f"Drain node {name}?", text, verb="Drain node", is_harsh=True)
    return ask.open(lambda: DrainNode(node.node, is_undone=node.is_drained))


def ask_rebalance(shell: Shell, group: ExpertGroupState) -> OrderDialog:
    text = (
        "The experts are placed anew, however small the gain. Ranks load experts beside their work; nothing "
        "pauses."
    )
    ask = OrderDialog(shell, f"Rebalance {group.group}?", text, verb="Rebalance")
    return ask.open(lambda: RebalanceExperts(group.group))


def ask_drain_rank(shell: Shell, rank: ExpertRankStatus) -> OrderDialog:
    text = "Other ranks take over the experts that it holds; then its process ends."
    ask = OrderDialog(shell, f"Drain {rank.name}?", text, verb="Drain", is_harsh=True)
    with ask.fields:
        replaced = ui.checkbox("Start a replacement", value=True)
    return ask.open(lambda: DrainExpertRank(rank.name, is_replaced=bool(replaced.value)), replaced)


def ask_scale_experts(shell: Shell, group: ExpertGroupState) -> OrderDialog:
    text = (
        "Set the number of expert ranks that are apart from workers. New ranks take their share of the "
        "experts; surplus ones hand over theirs first."
    )
    ask = OrderDialog(shell, f"Scale {group.group}?", text, verb="Scale")
    with ask.fields:
        count = ui.number("Expert ranks", value=group.wanted_ranks, min=1, max=COUNT_MAX, precision=0)
        count.props("outlined dense")
    return ask.open(lambda: ScaleExperts(int(count.value or 0), group.group), count)
