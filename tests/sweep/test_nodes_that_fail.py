"""What becomes of a sweep when nodes and engines fail: nodes that do at will what real ones do by chance; real ones are in tests/backends."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from raysd.draft.acceptance import AcceptanceCounts
from raysd.errors import EngineError, NodeLostError
from raysd.experiment import Experiment
from raysd.sweep import tables
from raysd.sweep.bench import Answers
from raysd.sweep.cells import Cell
from raysd.sweep.lossless import Answer, Comparison
from raysd.sweep.measure import Measured, unmeasured
from raysd.sweep.sequential import wanted_blocks
from raysd.sweep.sweep import sweep
from tests.stage_runs import attempt, piece

NONE, BF16, FP8 = ("none", None), ("bf16", 2), ("fp8", 2)


def failure(what: str) -> EngineError:
    return EngineError(what=what, where="log", fix="read it")


@dataclass
class Stand:
    """A Node. fails: how often cells of (arm, concurrency) come out invalid. lost_after: cells, after which it is gone. never: engines that do not start."""

    name: str
    experiment: Experiment
    together: bool = True
    fails: dict = field(default_factory=dict)
    lost_after: int | None = None
    never: set = field(default_factory=set)
    measured: list = field(default_factory=list)
    tok_s: Callable[[Cell], float] = lambda cell: 1.0
    up: set = field(default_factory=set)

    @property
    def section(self):
        return self.experiment.sweep

    def to_start(self, engine):
        return [] if engine in self.up | self.never else [engine]

    def prepare(self, engine):
        if NONE in self.never:
            raise failure("the baseline did not start")
        self.up.add(engine)
        return engine not in self.never

    def measure(self, cell: Cell) -> Measured:
        if self.lost_after is not None and len(self.measured) >= self.lost_after:
            raise NodeLostError(what=f"the node {self.name} was lost", where="sweep.nodes", fix="run again")
        self.measured.append(cell)
        point = (cell.arm, cell.concurrency)
        if cell.engine in self.never or self.fails.get(point, 0) > 0:
            self.fails[point] = self.fails.get(point, 0) - 1
            return unmeasured(cell, self.name, failure("the engine died"))
        row = unmeasured(cell, self.name, failure("")).row | {"valid": True, "invalid_reasons": [], "output_tok_s": self.tok_s(cell), "started_s": float(len(self.measured))}
        return Measured(row, [])

    def answer(self, engine):
        return None if engine in self.never else Answers([Answer("q", (1, 2), "stop")], AcceptanceCounts(1, 2, 1, (1, 0)))

    def compare(self, none, arm):
        return [Comparison("q", "equal")]

    def facts(self):
        return {"engines": {}}

    def logs(self):
        return {"none.log": b"said"}


@pytest.fixture
def experiment(tmp_path):
    return Experiment.model_validate({"name": "tiny", "target": {"model": str(tmp_path)}, "prompts": {"path": str(tmp_path / "none.jsonl")}, "capture": {}, "train": {}, "quantize": {},
                                      "sweep": {"concurrency": [1, 2], "k": [2], "blocks": 4}})


def run_on(store, experiment, *nodes):
    """Whole cells and metrics."""
    with attempt(store, experiment) as run:
        metrics = sweep(run, lambda run: contextlib.nullcontext(nodes))
        return tables.read_rows(run.out / "cells", list(tables.CELLS)), metrics


def test_a_node_that_is_lost_takes_only_what_it_had_not_finished(experiment, tmp_path):
    gone, other = Stand("gone", experiment, lost_after=9), Stand("other", experiment)
    order = threading.Event()
    measure = other.measure

    def not_before_the_other_is_lost(cell):
        order.wait(30)
        return measure(cell)

    def lost(cell, measure=gone.measure):
        try:
            return measure(cell)
        except NodeLostError:
            order.set()
            raise

    other.measure, gone.measure = not_before_the_other_is_lost, lost
    cells, metrics = run_on(tmp_path / "store", experiment, gone, other)
    assert metrics["valid_cells"] == len(cells) == 24
    by_group = {}
    for cell in cells:
        by_group.setdefault((cell["block"], cell["concurrency"]), set()).add(cell["node"])
    assert all(len(names) == 1 for names in by_group.values()), "arms are compared on one node"
    assert sum(cell["node"] == "gone" for cell in cells) == 9 and len(other.measured) == 15


def test_when_the_last_node_is_lost_the_stage_can_be_tried_again_and_repeats_no_cell(experiment, tmp_path):
    with pytest.raises(NodeLostError) as lost:
        run_on(tmp_path / "store", experiment, Stand("a", experiment, lost_after=5))
    assert lost.value.exit_code == 75
    again = Stand("a", experiment)
    _, metrics = run_on(tmp_path / "store", experiment, again)
    assert len(again.measured) == 19 and metrics["valid_cells"] == 24


def test_cells_that_are_all_there_but_of_two_nodes_are_not_compared(experiment, tmp_path):
    run_on(tmp_path / "store", experiment, Stand("a", experiment, fails={("bf16", 1): 99}))
    with pytest.raises(NodeLostError):  # the gap is filled on another node, which is lost before it has measured the rest of the first comparison
        run_on(tmp_path / "store", experiment, Stand("b", experiment, lost_after=11))
    last = Stand("c", experiment)
    cells, _ = run_on(tmp_path / "store", experiment, last)
    compared = {}
    for cell in cells:
        compared.setdefault((cell["block"], cell["concurrency"]), set()).add(cell["node"])
    assert last.measured and all(len(nodes) == 1 for nodes in compared.values())


def test_an_invalid_cell_is_measured_once_more(experiment, tmp_path):
    node = Stand("a", experiment, fails={("bf16", 2): 1})
    cells, metrics = run_on(tmp_path / "store", experiment, node)
    assert metrics["valid_cells"] == 24 and len(node.measured) == 25


def test_what_stays_invalid_is_shown_with_its_reason_and_is_not_tried_twice_in_every_block(experiment, tmp_path, capsys):
    node = Stand("a", experiment, fails={("bf16", 2): 99})
    cells, metrics = run_on(tmp_path / "store", experiment, node)
    invalid = [cell for cell in cells if not cell["valid"]]
    assert metrics["valid_cells"] == 20 and len(node.measured) == 25
    assert {(cell["arm"], cell["concurrency"]) for cell in invalid} == {("bf16", 2)} and all("the engine died" in cell["invalid_reasons"][0] for cell in invalid)
    assert capsys.readouterr().out.count("invalid: bf16, k 2, report, concurrency 2") == 4
    healthy = Stand("a", experiment)
    run_on(tmp_path / "store", experiment, healthy)
    assert len(healthy.measured) == 4, "the next attempt measures what was invalid, and nothing else"


def test_what_has_worked_again_is_worth_a_second_try(experiment, tmp_path):
    fails = {("bf16", 2): 2}
    node = Stand("a", experiment, fails=fails)
    measure = node.measure

    def fails_once_more(cell):
        if (cell.arm, cell.concurrency, cell.block) == ("bf16", 2, 2) and cell not in node.measured:
            fails["bf16", 2] = 1
        return measure(cell)

    node.measure = fails_once_more
    _, metrics = run_on(tmp_path / "store", experiment, node)
    assert metrics["valid_cells"] == 23, "only the first block's, which failed twice"


def test_an_engine_that_does_not_start_spoils_its_own_cells_and_no_others(experiment, tmp_path):
    cells, metrics = run_on(tmp_path / "store", experiment, Stand("a", experiment, never={FP8}))
    assert {cell["arm"] for cell in cells if not cell["valid"]} == {"fp8"} and metrics["valid_cells"] == 16
    assert set(metrics["acceptance"]) == {"bf16"} == set(metrics["lossless"])


def test_a_node_without_a_baseline_is_given_up_and_the_last_one_ends_the_sweep(experiment, tmp_path, capsys):
    bad, good = Stand("bad", experiment, never={NONE}), Stand("good", experiment)
    _, metrics = run_on(tmp_path / "store", experiment, bad, good)
    assert metrics["valid_cells"] == 24 and not bad.measured
    assert "given up: the node bad: the baseline did not start" in capsys.readouterr().out
    with pytest.raises(EngineError, match="the baseline did not start"):
        run_on(tmp_path / "other", experiment, Stand("bad", experiment, never={NONE}))
    assert not piece(tmp_path / "other", "cells").exists()


def test_what_is_no_fault_of_a_node_ends_the_sweep_at_once(experiment, tmp_path):
    node = Stand("a", experiment)
    node.compare = lambda none, arm: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run_on(tmp_path / "store", experiment, node, Stand("b", experiment))


def test_logs_of_other_nodes_become_part_of_the_artifact(experiment, tmp_path):
    with attempt(tmp_path / "store", experiment) as run:
        sweep(run, lambda run: contextlib.nullcontext([Stand("a", experiment)]))
        assert (run.out / "logs" / "none.log").read_bytes() == b"said"


def uneven(cell: Cell) -> float:
    """Speed-ups of 1.5 give or take some percent, different in every block."""
    return (1.0 if cell.arm == "none" else 1.5 * (1 + 0.04 * (cell.block % 3 - 1))) * 100


def until(experiment: Experiment, **values) -> Experiment:
    return experiment.model_copy(update={"sweep": experiment.sweep.model_copy(update={"blocks": 3, "until_ci": 0.04} | values)})


def test_blocks_are_added_until_the_intervals_are_narrow_and_a_killed_sweep_adds_no_others(experiment, tmp_path):
    experiment = until(experiment)
    cells, metrics = run_on(tmp_path / "store", experiment, Stand("a", experiment, tok_s=uneven), Stand("b", experiment, tok_s=uneven))
    blocks = 1 + max(cell["block"] for cell in cells)
    assert blocks == wanted_blocks(cells, 3, 0.04) > 5 and metrics["valid_cells"] == len(cells) == 6 * blocks
    again = Stand("a", experiment, tok_s=uneven)
    _, repeated = run_on(tmp_path / "store", experiment, again)
    assert not again.measured and repeated == metrics
    with pytest.raises(NodeLostError):
        run_on(tmp_path / "other", experiment, Stand("a", experiment, tok_s=uneven, lost_after=5 * 6 + 2))
    rest = Stand("a", experiment, tok_s=uneven)
    assert run_on(tmp_path / "other", experiment, rest)[1]["valid_cells"] == 6 * blocks and len(rest.measured) == 6 * blocks - 32


def test_no_block_is_added_beyond_the_most_or_after_the_limit_of_time(experiment, tmp_path):
    for number, (values, blocks) in enumerate([({"max_blocks": 6}, 6), ({"until_ci_limit_s": 1e-9}, 5), ({"until_ci": 0.5}, 5)]):
        changed = until(experiment, **values)
        cells, _ = run_on(tmp_path / str(number), changed, Stand("a", changed, tok_s=uneven))
        assert len({cell["block"] for cell in cells}) == blocks
