import threading

from raysd.experiment.engine import EngineSettings
from raysd.experiment.sweep import SweepSection
from raysd.sweep.cells import Cell, plan_block
from raysd.sweep.schedule import Answering, Block, Schedule, is_whole, left_to_measure

SECTION = SweepSection(arms=["none", "bf16"], concurrency=[1, 2], engine=EngineSettings(max_num_seqs=2))


def block(number: int) -> Block:
    return Block(number, tuple(plan_block(SECTION, number, together=True)))


def cells(number: int = 0) -> list[Cell]:
    return list(block(number).cells)


def test_of_a_block_that_was_begun_on_the_same_node_only_the_rest_is_left():
    first, *rest = cells()
    assert left_to_measure(cells(), {first: "a"}, "a") == rest


def test_another_node_measures_anew_what_is_compared_with_each_other_and_keeps_what_was_finished():
    one, two, three, four = cells()
    assert left_to_measure(cells(), {one: "a", two: "a", three: "a"}, "b") == [three, four]
    assert left_to_measure(cells(), {one: "a", two: "b"}, "a") == [two, three, four], "no ratio of two nodes"
    assert left_to_measure(cells(), dict.fromkeys(cells(), "a"), "b") == []


def test_a_block_is_whole_when_each_comparison_is_of_one_node():
    one, two, three, four = cells()
    assert is_whole(cells(), {one: "a", two: "a", three: "b", four: "b"})
    assert not is_whole(cells(), {one: "a", two: "a", three: "a", four: "b"}) and not is_whole(cells(), {one: "a", two: "a", three: "a"})


def test_a_block_that_its_node_gives_back_goes_to_the_next_who_asks():
    schedule = Schedule([Answering(), block(0), block(1)], {})
    assert schedule.take("a") == (Answering(), [])
    work, left = schedule.take("b")
    assert (work, left) == (block(0), cells(0))
    schedule.measured(cells(0)[0], "b")
    schedule.give_back(work)
    assert not schedule.done()  # a's
    assert schedule.take("a") == (block(1), cells(1)), "what b began, b may yet come for"
    assert schedule.take("b") == (block(0), cells(0)[1:])
    assert not schedule.done() and schedule.done()


def test_who_waits_gets_what_comes_back_and_is_let_go_at_the_end():
    schedule, got = Schedule([block(0)], {}), []
    work, _ = schedule.take("a")
    waits = threading.Thread(target=lambda: got.extend([schedule.take("b"), schedule.take("b")]))
    waits.start()
    schedule.give_back(work)
    schedule.add([block(1)])
    waits.join(30)
    assert [taken[0] for taken in got] == [block(0), block(1)]
    waits = threading.Thread(target=lambda: got.append(schedule.take("b")))
    waits.start()
    schedule.close()
    waits.join(30)
    assert got[-1] is None
