"""When a caller of expert ranks is parked, and for how long its rows waited."""

from engine.scheduling.expert_parking import ExpertParking


def look(parking, now_s, *, has_ranks=True, is_complete=False):
    parking.look(has_ranks=has_ranks, is_complete=is_complete, now_s=now_s)
    return parking.is_parked


def test_rows_that_wait_for_long_park_the_caller_until_every_expert_is_back():
    parking = ExpertParking(1.0)
    assert not look(parking, 0.0, is_complete=True)
    parking.rows_wait(now_s=1.0)
    assert not look(parking, 1.9)
    assert look(parking, 2.0)
    parking.rows_are_sent(now_s=3.0)
    assert look(parking, 3.1)  # the next layer may need what is missing still
    assert not look(parking, 3.2, is_complete=True)
    assert parking.waited_s(now_s=9.0) == 2.0


def test_a_caller_that_needs_none_of_the_missing_experts_is_parked_no_more():
    parking = ExpertParking(1.0)
    parking.rows_wait(now_s=0.0)
    assert look(parking, 1.0)
    parking.rows_are_sent(now_s=2.0)
    assert look(parking, 2.0)
    parking.rows_wait(now_s=2.5)
    assert look(parking, 2.6)
    parking.rows_are_sent(now_s=3.0)
    assert look(parking, 3.9)
    look(parking, 4.0)
    assert not look(parking, 5.0)
    assert parking.waited_s(now_s=5.0) == 2.5


def test_missing_experts_that_no_row_needs_do_not_park():
    parking = ExpertParking(1.0)
    assert not any(look(parking, float(at_s)) for at_s in range(10))


def test_a_caller_without_any_rank_is_parked_before_it_has_rows():
    parking = ExpertParking(1.0)
    assert not look(parking, 0.0, has_ranks=False)
    assert look(parking, 1.0, has_ranks=False)
    assert parking.waited_s(now_s=1.0) == 0.0


def test_the_wait_under_way_counts():
    parking = ExpertParking(1.0)
    parking.rows_wait(now_s=1.0)
    parking.rows_wait(now_s=2.0)
    assert parking.waited_s(now_s=4.0) == 3.0


def test_time_in_which_another_process_rows_may_wait_is_a_stall_and_no_wait():
    parking = ExpertParking(1.0)
    look(parking, 0.0, is_complete=True)
    look(parking, 5.0)
    assert parking.stalled_s(now_s=8.0) == 3.0
    parking.rows_wait(now_s=8.0)
    look(parking, 9.0, is_complete=True)
    assert parking.stalled_s(now_s=10.0) == 5.0
    parking.rows_are_sent(now_s=11.0)
    assert parking.stalled_s(now_s=20.0) == 6.0
    assert parking.waited_s(now_s=20.0) == 3.0
