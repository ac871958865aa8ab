"""Which engines are up; the servers here are plain objects, since what is asked is what becomes of one that does not start."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from raysd.errors import EngineError
from raysd.sweep.engines import Engines

NONE, BF16, FP8 = ("none", None), ("bf16", 3), ("fp8", 3)


def failure(of) -> EngineError:
    return EngineError(what=f"{of} ended", where="log", fix="read it")


@dataclass
class World:
    """Launches servers and remembers. never: engines that end before they are ready. cold: engines that end while they are warmed up, that often. without_process:
    those whose launch fails. held: how often somebody else's memory is in the way."""

    never: set = field(default_factory=set)
    without_process: set = field(default_factory=set)
    held: int = 0
    cold: dict = field(default_factory=dict)
    log: list = field(default_factory=list)
    up: list = field(default_factory=list)

    def engines(self, together=True) -> Engines:
        return Engines({NONE: NONE, BF16: BF16, FP8: FP8}, together, self.launch, Path("logs"), self.warm_up, self.wait_for_memory)

    def wait_for_memory(self):
        assert not self.up
        self.held -= 1
        if self.held >= 0:
            raise failure("the wait for memory")
        self.log.append("memory is free")

    def launch(self, spec, log_path):
        if spec in self.without_process:
            raise failure(spec)
        self.log.append(("start", spec[0], log_path.name))
        return Stand(self, spec)

    def warm_up(self, engine, server):
        if self.cold.get(engine, 0) > 0:
            self.cold[engine] -= 1
            raise failure(engine)


@dataclass
class Stand:
    world: World
    spec: tuple
    start_s: float = 1.0
    log_path: str = "log"
    command: tuple = ("vllm",)

    def __post_init__(self):
        self.world.up.append(self.spec)

    def is_ready(self):
        if self.spec in self.world.never:
            raise failure(self.spec)
        return True

    def stop(self):
        self.world.up.remove(self.spec)


def test_together_all_start_with_the_first_that_is_needed():
    world = World()
    engines = world.engines()
    assert engines.to_start(BF16) == [NONE, BF16, FP8]
    assert engines.get(BF16).spec == BF16 and world.up == [NONE, BF16, FP8]
    engines.get(FP8)
    assert len(world.log) == 4 and world.log[0] == "memory is free"
    engines.close()
    assert world.up == []


def test_alone_the_one_before_is_ended_and_its_memory_is_free_before_the_next_starts():
    world = World()
    engines = world.engines(together=False)
    engines.get(NONE)
    engines.get(BF16)
    assert world.up == [BF16] and world.log == ["memory is free", ("start", "none", "none.log"), "memory is free", ("start", "bf16", "bf16-k3.log")]


@pytest.mark.parametrize("together", [True, False])
def test_no_engine_starts_while_somebody_holds_the_memory_whatever_was_up_before(together):
    world = World(held=1)
    engines = world.engines(together)
    with pytest.raises(EngineError, match="memory"):
        engines.get(NONE)
    assert not world.log and engines.get(NONE)
    for engine in engines.up:
        engines.put_away(engine)
    world.log.clear()
    world.held = 1
    with pytest.raises(EngineError, match="memory"):
        engines.get(NONE)
    assert not world.log and not engines.given_up() and engines.get(NONE)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("trouble", [{"held": 99}, {"without_process": {NONE, BF16, FP8}}])
def test_what_keeps_a_process_from_starting_counts_as_a_start_that_failed(trouble, together):
    engines = World(**trouble).engines(together)
    for _ in range(9):
        with pytest.raises(EngineError):
            engines.get(BF16)
    assert BF16 in engines.given_up() and not engines.to_start(BF16)


def test_an_engine_without_a_process_keeps_no_other_from_starting():
    world = World(without_process={BF16})
    engines = world.engines()
    assert engines.get(NONE).spec == NONE and engines.get(FP8).spec == FP8 and BF16 not in world.up


def test_an_engine_that_does_not_start_is_tried_twice_and_the_others_are_up():
    world = World(never={FP8})
    engines = world.engines()
    for _ in range(4):
        with pytest.raises(EngineError, match="fp8"):
            engines.get(FP8)
    assert world.up == [NONE, BF16] and [entry[2] for entry in world.log[1:] if entry[1] == "fp8"] == ["fp8-k3.log", "fp8-k3-start2.log"]
    assert list(engines.given_up()) == [FP8] and engines.to_start(FP8) == []


def test_one_that_dies_while_it_is_warmed_up_starts_again():
    world = World(cold={BF16: 1})
    engines = world.engines()
    with pytest.raises(EngineError, match="bf16"):
        engines.get(BF16)
    assert engines.get(BF16).spec == BF16 and not engines.given_up()


def test_one_that_died_at_work_starts_again_however_often():
    world = World()
    engines = world.engines()
    for _ in range(5):
        engines.get(BF16)
        engines.put_away(BF16)
        assert BF16 not in world.up
    assert engines.get(BF16) and not engines.given_up()


def test_one_that_must_not_be_measured_cannot_be_had():
    world = World()
    engines = world.engines()
    engines.get(BF16)
    engines.refuse(BF16, failure("no draft"))
    with pytest.raises(EngineError, match="no draft"):
        engines.get(BF16)
    assert world.up == [NONE, FP8]


def test_one_that_is_starting_when_all_are_ended_is_ended_too():
    world = World()
    engines = world.engines(together=False)

    class Slow(Stand):
        def is_ready(self):
            threading.Thread(target=engines.close).start()
            return False

    engines._launch = lambda spec, log_path: Slow(world, spec)
    with pytest.raises(EngineError, match="at its end"):
        engines.get(NONE)
    assert world.up == []
