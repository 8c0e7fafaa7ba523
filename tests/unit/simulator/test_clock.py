"""Virtual time: calls in their order, and time in which nothing happens."""

from simulator.clock import VirtualClock


def never():
    return False


def test_calls_of_one_instant_run_in_the_order_in_which_they_were_scheduled():
    clock, seen = VirtualClock(), []
    clock.at(2.0, seen.append, "late")
    clock.after(1.0, seen.append, "first")
    clock.at(1.0, seen.append, "second")
    clock.at(1.0, clock.at, 0.5, seen.append, "the past is now")
    clock.at(1.0, seen.append, "third")
    clock.run(is_over=never)
    assert seen == ["first", "second", "third", "the past is now", "late"]
    assert (clock.now_s, clock.event_count) == (2.0, 6)


def test_a_clock_stands_where_it_was_told_to_and_goes_on_from_there():
    clock, seen = VirtualClock(), []
    for at_s in (1.0, 2.0, 3.0):
        clock.at(at_s, seen.append, at_s)
    clock.run(is_over=never, until_s=2.0)
    assert (seen, clock.now_s) == ([1.0, 2.0], 2.0)
    clock.run(is_over=never, until_s=2.5)
    assert (seen, clock.now_s) == ([1.0, 2.0], 2.5)
    clock.run(is_over=never)
    assert (seen, clock.now_s) == ([1.0, 2.0, 3.0], 3.0)


def test_the_end_is_asked_for_every_so_many_events():
    clock, asked = VirtualClock(), []
    for at_s in range(8):
        clock.at(at_s, asked.append, None)

    def is_over():
        asked.append(clock.event_count)
        return clock.event_count == 6

    clock.run(is_over=is_over, check_every=3)
    assert [count for count in asked if count is not None] == [0, 3, 6]
    assert clock.now_s == 5.0


def test_only_what_recurs_is_put_off():
    clock, seen = VirtualClock(), []

    def beat():
        seen.append(round(clock.now_s, 6))
        if len(seen) == 2:
            clock.skip_idle_time(lead_s=10.0, least_s=60.0)
        clock.after(1.0, beat)

    clock.recurring.add(beat)
    clock.at(0.0, beat)
    clock.at(90.0, seen.append, "once")
    clock.run(is_over=lambda: "once" in seen)
    assert seen == [0, 1, *range(81, 90), "once"]


def test_less_than_a_minute_is_not_left_out():
    clock, seen = VirtualClock(), []
    clock.at(69.0, seen.append, "late")
    clock.skip_idle_time(lead_s=10.0, least_s=60.0)
    assert clock.now_s == 0.0
    clock.at(0.0, lambda: clock.skip_idle_time(lead_s=10.0, least_s=59.0))
    clock.run(is_over=lambda: clock.now_s > 0.0)
    assert (clock.now_s, seen) == (59.0, [])
