import threading

from raysd.load.tally import Tally, telling


def test_what_is_told_is_how_far_the_load_is():
    told, twice = [], threading.Event()

    def progress(doing, done=None, total=None, unit="", **figures):
        told.append((doing, done, total, unit, figures))
        tally.failed = 1
        if len(told) == 2:
            twice.set()

    tally = Tally(requests=9, ended=4, in_flight=2)
    with telling(tally, progress, every_s=0.001):
        assert twice.wait(30)
    assert told[:2] == [("answering", 4, 9, "requests", {"in_flight": 2}), ("answering", 4, 9, "requests", {"failed": 1, "in_flight": 2})]
    assert all(thread.name != "progress of the load" for thread in threading.enumerate())


def test_nothing_is_told_before_there_is_a_load_nor_when_nobody_reads():
    asked = threading.Event()

    def progress(*_, **__):
        assert tally.requests
        asked.set()
        raise BrokenPipeError

    tally = Tally()
    with telling(tally, progress, every_s=0.001):
        assert not asked.wait(0.05)
        tally.requests = 3
        assert asked.wait(30)


def test_parts_add_up():
    tally = Tally(1, 1, 1, 1)
    tally.become_sum([Tally(5, 2, 1, 3), Tally(4, 4, 0, 0)])
    assert tally == Tally(9, 6, 1, 3)
