from collections import Counter

from raysd.experiment.engine import EngineSettings
from raysd.experiment.sweep import SweepSection, Workload
from raysd.sweep.cells import Cell, plan_block, plan_engines


def section(**values) -> SweepSection:
    return SweepSection(**{"concurrency": [1, 4], "engine": EngineSettings(max_num_seqs=8)} | values)


def plan(sweep: SweepSection, together: bool = True) -> list[Cell]:
    return [cell for block in range(sweep.blocks) for cell in plan_block(sweep, block, together)]


def test_blocks_go_forth_and_back_and_arms_take_turns_within_them():
    cells = plan(section(concurrency=[1]))
    assert [cell.arm for cell in cells] == ["none", "bf16", "fp8", "fp8", "bf16", "none", "none", "bf16", "fp8"]
    assert [cell.block for cell in cells] == [0] * 3 + [1] * 3 + [2] * 3
    assert [(cell.arm, cell.concurrency) for cell in plan(section())[:6]] == [(arm, c) for c in (1, 4) for arm in ("none", "bf16", "fp8")]


def test_engines_that_are_up_one_at_a_time_are_changed_as_seldom_as_can_be():
    cells = plan(section(), together=False)
    changes = [(one.arm, other.arm) for one, other in zip(cells, cells[1:], strict=False) if one.engine != other.engine]
    assert changes == [("none", "bf16"), ("bf16", "fp8"), ("fp8", "bf16"), ("bf16", "none"), ("none", "bf16"), ("bf16", "fp8")]
    assert sorted(map(str, cells)) == sorted(map(str, plan(section())))


def test_every_cell_is_planned_once_and_an_arm_may_run_at_fewer_concurrencies():
    workloads = [Workload(name="short", osl=16), Workload(name="long", osl=64)]
    cells = plan(section(arm_concurrency={"fp8": [4]}, k=[3, 1], workloads=workloads, requests_per_slot=5))
    assert len({str(cell.identity()) for cell in cells}) == len(cells)
    # 3 blocks x 2 workloads: the baseline once a concurrency, bf16 for both k, fp8 for both k at one concurrency
    assert Counter(cell.arm for cell in cells) == {"none": 12, "bf16": 24, "fp8": 12}
    assert all((cell.k is None) == (cell.arm == "none") for cell in cells)
    assert {cell.osl for cell in cells if cell.workload == "long"} == {64}
    assert {cell.requests for cell in cells if cell.concurrency == 4} == {20}


def test_the_baseline_needs_one_engine_whatever_the_ks():
    assert plan_engines(section(k=[3, 1], arms=["none", "bf16"])) == [("none", None), ("bf16", 3), ("bf16", 1)]


def test_random_prompts_come_ten_a_slot_unless_the_workload_says_otherwise():
    workloads = [Workload(name="real"), Workload(name="1k1k", kind="random", isl=1024), Workload(name="few", kind="random", isl=1024, requests_per_slot=2)]
    cells = plan(section(workloads=workloads, arms=["none"], concurrency=[4], requests_per_slot=5))
    assert [cell.requests for cell in cells[:3]] == [20, 40, 8]
