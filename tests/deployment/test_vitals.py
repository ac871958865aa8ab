"""When an engine counts as stuck, and a draft's acceptance as too low."""

from raysd.deployment.vitals import Vitals


def vitals(floor: float | None = None) -> Vitals:
    return Vitals(stuck_after_s=60, floor=floor, floor_s=300)


def test_an_engine_that_steps_is_not_stuck():
    seen = vitals()
    for now in range(0, 600, 10):
        seen.step(now, 1, 0, 0, 0)
        assert not seen.is_stuck(now + 5, 1)


def test_an_engine_with_requests_that_does_not_step_is_stuck():
    seen = vitals()
    seen.step(0, 1, 0, 0, 0)
    assert not seen.is_stuck(50, 1)
    assert seen.is_stuck(111, 1)


def test_an_engine_that_never_stepped_is_stuck_with_its_first_request():
    seen = vitals()
    assert not seen.is_stuck(1000, 1)
    assert not seen.is_stuck(1060, 1)
    assert seen.is_stuck(1061, 1)


def test_an_idle_hour_counts_for_nothing():
    seen = vitals()
    seen.step(0, 1, 0, 0, 0)
    assert not seen.is_stuck(3600, 0)
    assert not seen.is_stuck(3610, 1)  # a request has just come
    assert not seen.is_stuck(3615, 0)
    assert not seen.is_stuck(3700, 1)


def test_acceptance_is_that_of_the_last_minutes():
    seen = vitals()
    for now in range(300):
        seen.step(now, 1, 0, 1, 2)
    for now in range(300, 600):
        seen.step(now, 1, 0, 1, 1)
    assert seen.acceptance_length(450) < 3 and round(seen.acceptance_length(601), 2) == 2.0


def test_few_drafts_tell_nothing():
    seen = vitals(floor=1.5)
    for now in range(99):
        seen.step(now * 10, 1, 0, 1, 0)
    assert seen.acceptance_length(300) is None and seen.below_floor(10_000) is None


def test_below_the_floor_is_told_after_so_many_minutes_and_not_before():
    seen = vitals(floor=1.5)
    for now in range(1000, 1400):
        seen.step(now, 4, 0, 4, 1)
        assert (seen.below_floor(now) is not None) == (now >= 1300), now
    for now in range(1400, 1800):
        seen.step(now, 4, 0, 4, 4)
    assert seen.below_floor(1800) is None


def test_without_a_floor_nothing_is_below_it():
    seen = vitals()
    for now in range(1000):
        seen.step(now, 1, 0, 1, 0)
    assert seen.below_floor(1000) is None


def test_steps_of_one_second_are_kept_as_one():
    seen = vitals()
    for now in range(100_000):
        seen.step(now / 100, 1, 0, 1, 1)
    seen.acceptance_length(1000)
    assert len(seen._seconds) <= 302


def test_a_policy_is_told_what_runs_and_waits():
    seen = vitals()
    seen.step(0, 5, 2, 0, 0)
    assert seen.stats(1) == {"running": 5.0, "waiting": 2.0}
    seen.step(1, 5, 2, 200, 100)
    assert seen.stats(2) == {"running": 5.0, "waiting": 2.0, "acceptance_length": 1.5}
