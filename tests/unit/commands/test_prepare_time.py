"""A worker gives a request up while there is time for a second one."""

import pytest

from baton.config import DEVICE_STEP_TOKENS, STEP_TOKENS, Config
from baton.core.errors import SetupError
from commands.settings import load_config


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([], 10.0),
        (["router.queue_wait_s=6"], 2.0),
        (["router.request_timeout_s=3"], 1.0),
        (["router.queue_wait_s=120"], 10.0),
        (["engine.prepare_s=12"], 12.0),
    ],
)
def test_the_time_leaves_room_for_a_second_worker(sets, expected):
    config = load_config(sets)
    assert config.settled().engine.prepare_s == expected
    assert config.settled().settled() == config.settled()


@pytest.mark.parametrize(
    "sets",
    [
        ["engine.prepare_s=30"],
        ["engine.prepare_s=31"],
        ["engine.prepare_s=2", "router.queue_wait_s=2"],
        ["engine.prepare_s=20", "router.request_timeout_s=20"],
        ["models.m.model.path=a", "models.m.engine.prepare_s=40"],
    ],
)
def test_a_time_that_leaves_none_is_one_line_that_says_what_to_do(sets):
    with pytest.raises(
        SetupError, match=r"engine\.prepare_s: .* must be below router\..*leave it out"
    ) as caught:
        load_config(sets)
    assert "\n" not in str(caught.value)
    assert "second worker" in str(caught.value)


def test_steps_on_a_gpu_are_longer_unless_somebody_says_how_long() -> None:
    device = "model.device=cuda:0"
    assert load_config([]).engine.step_tokens_max == STEP_TOKENS
    assert load_config([device]).engine.step_tokens_max == DEVICE_STEP_TOKENS
    assert load_config([device, "engine.threads=2"]).engine.step_tokens_max == DEVICE_STEP_TOKENS
    assert load_config([device, "engine.step_tokens_max=256"]).engine.step_tokens_max == 256
    made = load_config([device])
    assert Config(**made.model_dump()) == made


def test_a_model_on_another_kind_of_device_has_its_usual_steps() -> None:
    def sizes(*sets: str) -> dict[str, int]:
        config = load_config(["models.a.model.path=x", "models.b.model.path=y", *sets])
        return {name: config.of_model(name).engine.step_tokens_max for name in "ab"}

    on_gpu, base = "models.a.model.device=cuda", "model.device=cuda"
    assert sizes() == {"a": STEP_TOKENS, "b": STEP_TOKENS}
    assert sizes(on_gpu) == {"a": DEVICE_STEP_TOKENS, "b": STEP_TOKENS}
    assert sizes(base, "models.b.model.device=cpu") == {"a": DEVICE_STEP_TOKENS, "b": STEP_TOKENS}
    assert sizes(on_gpu, "engine.step_tokens_max=300") == {"a": 300, "b": 300}
    assert sizes(on_gpu, "models.a.engine.step_tokens_max=700") == {"a": 700, "b": STEP_TOKENS}
