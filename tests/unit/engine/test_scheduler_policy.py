"""The scheduler's policy: whose turn it is, how large chunks are, what is computed once, and how room is
made."""

import pytest

from baton.core.chunks import PLANNED_SHARE
from baton.core.costs import prompt_pairs
from baton.core.messages import Phase
from baton.core.sampling import SamplingParams
from baton.core.steps import PENDING_TOKEN
from engine.scheduling.order import OLDEST_EVERY, PRIORITY_AGE_S, VirtualTokenCounters
from engine.scheduling.step_time import StepWork
from tests.unit.engine.test_scheduler import Bench, expected, sequence


def start_order(bench):
    return [key[0] for key in sorted(bench.first_step, key=lambda key: (bench.first_step[key], key))]


# --- order ------------------------------------------------------------------------------------------


def test_a_lower_priority_number_goes_first():
    bench = Bench(batch=1)
    bench.add(sequence("low", [1], priority=5), sequence("high", [2], priority=-1))
    bench.run()
    assert start_order(bench) == ["high", "low"]


def test_waiting_makes_up_for_priority():
    bench = Bench(batch=1)
    bench.add(sequence("old", [1], priority=2))
    bench.now_s = 2 * PRIORITY_AGE_S
    bench.add(sequence("new", [2], priority=0))
    bench.run()
    assert start_order(bench) == ["old", "new"]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    bench = Bench(blocks=64, step_tokens=8)
    bench.add(sequence("long", range(160)))
    bench.step()
    bench.add(sequence("short", range(300, 304)))
    bench.step()
    assert ("short", 0) in bench.done


def test_a_long_prompt_goes_on_while_short_ones_keep_coming():
    bench = Bench(blocks=64, step_tokens=8)
    bench.add(sequence("long", range(80)))
    for i in range(OLDEST_EVERY * 10 + 2):
        bench.add(sequence(f"s{i}", range(1000 + 8 * i, 1008 + 8 * i)))
        bench.step()
    assert ("long", 0) in bench.done


def test_the_stated_bound_of_being_passed_holds():
    """A long prompt that finds nobody waiting is passed by three short ones at most."""
    bench = Bench(blocks=64, step_tokens=16, batch=1)
    bench.add(sequence("running", [7], max_tokens=3))
    bench.step()
    bench.add(sequence("long", range(100, 140)))
    bench.add(*(sequence(f"s{i}", [1000 + i]) for i in range(12)))
    bench.run()
    assert start_order(bench)[0] == "running"
    assert start_order(bench).index("long") <= OLDEST_EVERY


def test_clients_share_the_engine_however_many_requests_one_of_them_sends():
    bench = Bench(blocks=400, step_tokens=64, batch=2)
    flood = [sequence(f"a{i:02}", range(1000 * i, 1000 * i + 60), fairness_key="a") for i in range(40)]
    bench.add(*flood)
    for _ in range(12):
        bench.step()
    bench.add(
        *(sequence(f"b{i}", range(90_000 + i * 100, 90_060 + i * 100), fairness_key="b") for i in range(4))
    )
    done_before = len(bench.done)
    while not all((f"b{i}", 0) in bench.done for i in range(4)):
        bench.step()
    assert len(bench.done) - done_before <= 16  # and not 28


def test_a_client_that_comes_back_has_saved_nothing_up():
    shares = VirtualTokenCounters()
    shares.join("busy")
    shares.charge("busy", 10_000)
    shares.join("idle")
    assert shares.level("idle") == shares.level("busy")


# --- chunks -----------------------------------------------------------------------------------------


def chunks_beside_a_decode(*, tpot_slo_s, own_slo_s=0.0, **engine):
    """Prompt tokens per step, beside one running sequence, at a millisecond per token."""
    bench = Bench(blocks=200, step_tokens=128, tpot_slo_s=tpot_slo_s, **engine)
    bench.step_s = lambda plan: 0.002 + 0.001 * plan.token_count
    bench.add(sequence("warm", range(5000, 5100)))
    bench.run()
    bench.add(sequence("d", [1], max_tokens=60, tpot_slo_s=own_slo_s))
    for _ in range(10):
        bench.step()
    bench.add(sequence("p", range(100, 500)))
    sizes = []
    while ("p", 0) not in bench.done:
        sizes += [len(item.tokens) for item in bench.step().items if item.key[0] == "p"]
    return sizes[:-1]


def test_without_an_objective_chunks_fill_the_budget():
    assert chunks_beside_a_decode(tpot_slo_s=0.0) == [127, 127, 127]


@pytest.mark.parametrize("engine", [{"tpot_slo_s": 0.05}, {"tpot_slo_s": 9.0, "own_slo_s": 0.05}])
def test_chunks_keep_the_objective_of_the_running_sequences(engine):
    sizes = chunks_beside_a_decode(chunk_tokens_min=8, **engine)
    # 2 ms and a millisecond per token, of which one decodes: a part of the 50 ms is left to other things.
    assert all(35 <= size <= PLANNED_SHARE * 50 - 3 for size in sizes[1:])


def step_with_attention_s(plan):
    """At 0.2 ms a token, and two microseconds for each position before it."""
    pairs = sum(prompt_pairs(i.first_position, i.first_position + len(i.tokens)) for i in plan.items)
    return 0.002 + 0.0002 * plan.token_count + 2e-6 * pairs


def bench_that_knows_attention(**engine):
    """A bench at which one sequence decodes beside the prompts that come."""
    bench = Bench(blocks=900, step_tokens=128, tpot_slo_s=0.05, chunk_tokens_min=8, **engine)
    bench.step_s = step_with_attention_s
    bench.add(sequence("warm", range(5000, 6000)))
    bench.run()
    bench.add(sequence("d", [1], max_tokens=90))
    for _ in range(10):
        bench.step()
    return bench


def test_chunks_keep_the_objective_far_into_a_long_prompt():
    bench = bench_that_knows_attention()
    bench.add(sequence("p", range(100, 1100)))
    beside: list[tuple[int, float]] = []
    while ("p", 0) not in bench.done:
        plan = bench.step()
        if len(plan.items) == 2:
            beside.append((len(plan.items[-1].tokens), step_with_attention_s(plan)))
    assert len(beside) > 20
    assert all(0.03 < elapsed_s <= 0.05 for _, elapsed_s in beside[1:-1])
    assert beside[1][0] > 3 * beside[-2][0]


def test_what_a_chunk_that_was_cut_short_leaves_over_starts_nothing():
    bench = bench_that_knows_attention()
    bench.add(sequence("p", range(100, 1100)), sequence("q", range(2000, 3000)))
    chunks: list[dict[str, int]] = []
    while ("p", 0) not in bench.done:
        plan = bench.step()
        chunks.append({item.key[0]: len(item.tokens) for item in plan.items if item.key[0] != "d"})
    both = [found for found in chunks if len(found) == 2]
    assert len(chunks) > 20
    assert len(both) <= 2  # where the one ends the other begins
    assert all(count >= 8 for found in chunks[:-1] for count in found.values())


def test_the_queues_time_counts_what_attention_takes():
    bench = Bench(blocks=600, step_tokens=128, tpot_slo_s=0.0)
    for _ in range(20):
        times = bench.scheduler.times
        for start in (0, 1000):
            times.observe(
                StepWork(prompt_tokens=100, pairs=prompt_pairs(start, start + 100)), 0.02 + start * 2e-5
            )
    bench.add(sequence("a", range(1100)), sequence("b", [1]))
    last = list(bench.scheduler.sequences())[-1]
    assert bench.scheduler.queue_s(last) == pytest.approx(11 * 0.02 + 1100**2 / 2 * 2e-7, rel=0.3)


def test_prompts_take_as_long_as_sequences_that_miss_their_objective_by_themselves():
    sizes = chunks_beside_a_decode(tpot_slo_s=0.001, chunk_tokens_min=1)
    # A step of one sequence takes 3 ms, a token of a prompt one. Later on nobody decodes any more.
    assert set(sizes[1:40]) <= {2, 3}


def test_an_objective_that_cannot_be_kept_still_leaves_prompts_the_least_chunk():
    assert set(chunks_beside_a_decode(tpot_slo_s=0.001, chunk_tokens_min=32)) == {32}


# --- computed once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_count", [3, 8, 9, 30])
@pytest.mark.parametrize("phase", [Phase.AGGREGATED, Phase.PREFILL])
@pytest.mark.parametrize("overlap", [False, True])
def test_choices_of_one_prompt_compute_it_once(prompt_count, phase, overlap):
    """Each of the others computes one token, for its logits."""
    bench = Bench(blocks=64, step_tokens=16, batch=8, overlap=overlap)
    choices = [sequence(f"c{i}", range(prompt_count), max_tokens=1, phase=phase) for i in range(6)]
    bench.add(*choices)
    bench.run()
    assert len(bench.done) == 6
    assert bench.computed_tokens == prompt_count + 5
    bench.assert_empty()


def test_choices_go_their_own_ways_from_a_copied_block():
    bench = Bench(blocks=64, step_tokens=32, batch=8, next_token=lambda tokens: len(tokens) * 7 + tokens[-1])
    one, two = sequence("one", range(6), max_tokens=5), sequence("two", range(6), max_tokens=5)
    bench.add(one)
    bench.step()
    bench.add(two)
    bench.step()
    assert bench.plans[-1].copies
    assert one.block_ids[0] == two.block_ids[0]
    assert set(one.block_ids[1:]).isdisjoint(two.block_ids[1:])
    bench.run()
    assert bench.emitted["one", 0] == bench.emitted["two", 0]


def test_a_sibling_does_not_wait_for_one_that_is_gone():
    bench = Bench(blocks=64, step_tokens=8)
    first, second = sequence("a", range(30)), sequence("b", range(30))
    bench.add(first, second)
    bench.step()
    assert ("b", 0) not in bench.first_step
    bench.scheduler.remove(first)
    bench.run()
    assert bench.done == [second.key]
    bench.assert_empty()


# --- overlap ----------------------------------------------------------------------------------------


def test_two_steps_are_in_line_and_the_second_names_the_token_of_the_first():
    bench = Bench(overlap=True)
    bench.add(sequence("s", range(4), max_tokens=6))
    bench.plan()
    first, second = bench.line
    assert first.items[0].sample_index == 0
    assert (second.items[0].tokens, second.items[0].first_position) == ((PENDING_TOKEN,), 4)
    assert second.items[0].sample_index == 1
    bench.run()
    assert bench.emitted["s", 0] == expected(range(4), 6)


def test_nothing_is_planned_beyond_the_last_token():
    bench = Bench(overlap=True)
    bench.add(sequence("s", range(4), max_tokens=3))
    bench.run()
    assert bench.computed_tokens == 4 + 2


def test_a_stop_found_one_step_late_is_the_end_and_its_extra_position_is_never_offered():
    stop = expected(range(3), 5)[4]
    params = SamplingParams(max_tokens=20, stop_token_ids=(stop,))
    bench = Bench(overlap=True)
    bench.add(sequence("s", range(3), sampling=params))
    bench.run()
    assert bench.emitted["s", 0] == expected(range(3), 5)
    bench.assert_empty()
    # All that can be found was computed from the tokens its hash names.
    again = sequence("t", [*range(3), *expected(range(3), 5), 1, 2])
    bench.add(again)
    bench.run()
    assert bench.emitted["t", 0] == expected(again.tokens[:10], 1)


def test_no_step_is_planned_beside_a_long_one():
    bench = Bench(overlap=True)
    bench.step_s = lambda plan: 1.0
    bench.add(sequence("s", range(4), max_tokens=30))
    bench.run()
    late = [plan.items[0].tokens == (PENDING_TOKEN,) for plan in bench.plans[15:]]
    assert not any(late)


# --- room -------------------------------------------------------------------------------------------


def squeezed(**engine):
    """Four sequences in a quarter of the blocks they want together."""
    bench = Bench(blocks=11, step_tokens=32, **engine)
    requests = [sequence(f"s{i}", range(100 * i, 100 * i + 12), max_tokens=30) for i in range(4)]
    bench.add(*requests)
    bench.run()
    for i, seq in enumerate(requests):
        assert bench.emitted[seq.key] == expected(range(100 * i, 100 * i + 12), 30)
    bench.assert_empty()
    return bench


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("swap_bytes", [0, 4, 40])
def test_in_a_quarter_of_the_room_all_complete_with_their_own_tokens(overlap, swap_bytes):
    bench = squeezed(overlap=overlap, swap_bytes=swap_bytes)
    assert bench.scheduler.preemption_count > 0


@pytest.mark.parametrize(("block_s", "token_s", "swaps"), [(1e-5, 1e-3, True), (0.1, 1e-5, False)])
def test_what_is_cheaper_of_swapping_and_computing_again(block_s, token_s, swaps):
    bench = Bench(blocks=11, step_tokens=32, swap_bytes=40)
    times = bench.scheduler.times
    times._latest.theta = [0.001, token_s * 256, 0.0, 0.0, block_s * 16, 0.0, 0.0, 0.0]
    bench.step_s = lambda plan: times.predict_s(
        type(bench.scheduler._steps[0].work)(plan.token_count, moved_blocks=len(plan.swap_out))
    )
    bench.add(*(sequence(f"s{i}", range(100 * i, 100 * i + 12), max_tokens=30) for i in range(4)))
    while not bench.scheduler.preemption_count:
        bench.step()
    assert (bench.scheduler.swap_count > 0) == swaps


def test_what_was_swapped_is_not_computed_again():
    assert squeezed(swap_bytes=400).computed_tokens < squeezed().computed_tokens


def test_when_the_only_one_picked_gives_way_somebody_else_runs_at_once():
    """A budget of one token picks one decode; it lacks a block and is the lowest."""
    bench = Bench(blocks=13, step_tokens=1, batch=2)
    bench.add(sequence("a", [0]), sequence("b", [0], priority=1))
    bench.add(sequence("low", range(100, 106), max_tokens=9, priority=2))
    bench.add(sequence("high", range(30), max_tokens=8))
    bench.run()
    assert len(bench.done) == 4
    bench.assert_empty()
