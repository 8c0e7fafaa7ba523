"""Actors set their variables before anything that could load torch."""

import os
from types import SimpleNamespace

import pytest

from worker import actor, expert_rank_actor, stage_actor

NAME = "OMP_NUM_THREADS"


class Reached(Exception):
    """The step after the variables, which a test must not take: it changes the process."""


@pytest.mark.parametrize(
    ("module", "step", "make"),
    [
        (actor, "pin_to", lambda variables: actor.WorkerActor(SimpleNamespace(cores=()), variables)),
        (
            expert_rank_actor,
            "pin_to",
            lambda variables: expert_rank_actor.ExpertRankActor(SimpleNamespace(cores=()), variables),
        ),
        (stage_actor, "begin_session", stage_actor.StageActor),
    ],
)
def test_variables_are_set_before_anything_else(monkeypatch, module, step, make):
    monkeypatch.setenv(NAME, "1")

    def reached(*_):
        raise Reached(os.environ[NAME])

    monkeypatch.setattr(module, step, reached)
    with pytest.raises(Reached, match=r"^7$"):
        make({NAME: "7"})
