"""What a sweep recommends, from cells whose numbers can be worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raysd.deployment.recommend import Asked, Ground, Recommendation, lines, recommend
from raysd.errors import ExperimentError, MeasurementError
from raysd.experiment.serve import ServeSection

BASELINE = {1: 100.0, 2: 190.0, 4: 350.0, 8: 600.0, 16: 900.0, 32: 1000.0}
"""Output tok/s; from 16 on, more requests are hardly worth it."""
NOISE = (0.99, 1.0, 1.01)


def cell(arm: str, k: int | None, concurrency: int, block: int, rate: float, **changes: Any) -> dict[str, Any]:
    drafts = 1000 if k else 0
    return {"workload": "report", "arm": arm, "k": k, "concurrency": concurrency, "block": block, "valid": True, "output_tok_s": rate * (1 + 0.05 * block),
            "tpot_ms_p50": 1000 * concurrency / rate, "e2el_ms_p50": 128_000 * concurrency / rate, "drafts": drafts, "accepted": 800 if k else 0} | changes


def cells(speedups: dict[int, dict[int, float]], arm: str = "bf16", baseline: dict[int, float] = BASELINE) -> list[dict[str, Any]]:
    """A sweep of three blocks. speedups: k to concurrency to speed over no draft."""
    made = [cell("none", None, concurrency, block, rate) for concurrency, rate in baseline.items() for block in range(3)]
    return made + [cell(arm, k, concurrency, block, baseline[concurrency] * ratio * NOISE[block])
                   for k, at in speedups.items() for concurrency, ratio in at.items() for block in range(3)]


def constant(ratio: float) -> dict[int, float]:
    return dict.fromkeys(BASELINE, ratio)


def of(sweep: list[dict[str, Any]], **asked: Any) -> Recommendation:
    return recommend(sweep, Asked(**asked), Ground(max_num_seqs=64, engine_start_s=120.0, fitting_replicas=2))


def reason(found: Recommendation, field: str):
    return next(reason for reason in found.reasons if reason.field == field)


def test_the_target_is_where_more_requests_stop_to_pay_and_a_replica_takes_more_while_it_loses_nothing():
    found = of(cells({3: constant(1.5)}))
    assert found.autoscaling["target_ongoing_requests"] == 16.0  # from 16 to 32: +11 % of output for +100 % of requests
    assert found.autoscaling["max_ongoing_requests"] == 32
    assert (found.arm, found.k, found.k_per_batch) == ("bf16", 3, None)
    told = reason(found, "target_ongoing_requests").cells
    assert [each["concurrency"] for each in told] == [1, 2, 4, 8, 16, 32] and told[0]["blocks"] == [0, 1, 2] and told[0]["k"] == 3


def test_a_sweep_that_does_not_reach_the_knee_says_so_and_leaves_room():
    found = of(cells({3: {1: 1.5, 2: 1.5, 4: 1.5, 8: 1.5}}, baseline={c: r for c, r in BASELINE.items() if c <= 8}))
    assert (found.autoscaling["target_ongoing_requests"], found.autoscaling["max_ongoing_requests"]) == (5.0, 8)
    assert "highest concurrency that was measured" in reason(found, "target_ongoing_requests").because


def test_a_replica_takes_no_more_than_its_engine_decodes():
    found = recommend(cells({3: constant(1.5)}), Asked(), Ground(max_num_seqs=12))
    assert found.autoscaling["max_ongoing_requests"] == 12 and found.autoscaling["target_ongoing_requests"] == 8.0


def test_what_falls_is_not_asked_of_a_replica():
    falling = BASELINE | {32: 700.0}
    found = of(cells({3: constant(1.5)}, baseline=falling))
    assert found.autoscaling["max_ongoing_requests"] == 16 and found.autoscaling["target_ongoing_requests"] == 10.0


def test_slow_tokens_limit_the_target():
    assert of(cells({3: constant(1.0001)}), tpot_ms=12.0, arm="none").autoscaling["target_ongoing_requests"] == 4.0  # at 8: 13.3 ms
    with pytest.raises(ExperimentError, match="even at concurrency 1"):
        of(cells({3: constant(1.5)}), tpot_ms=1.0)


def test_the_k_of_each_load_is_the_fastest_and_changes_only_where_the_blocks_say_so():
    found = of(cells({1: {1: 1.3, 2: 1.3, 4: 1.3, 8: 1.35, 16: 1.3, 32: 1.2}, 3: {1: 1.6, 2: 1.5, 4: 1.4, 8: 1.351, 16: 1.1, 32: 0.9},
                      7: {1: 1.8, 2: 1.505, 4: 1.2, 8: 1.0, 16: 0.8, 32: 0.6}}))
    # at 2, k = 7 is no slower than k = 3 beyond noise and stays; at 8, k = 3 stays before k = 1
    assert found.k_per_batch == [[1, 3, 7], [4, 15, 3], [16, 64, 1]] and found.k == 7
    [*_, last] = [each for each in found.reasons if each.field == "k"]
    assert {(each["k"], each["concurrency"]) for each in last.cells} == {(0, 16), (1, 16), (3, 16), (7, 16)} | set()


def test_where_no_draft_is_faster_none_is_drafted_and_the_target_stops_there():
    found = of(cells({3: {1: 1.5, 2: 1.4, 4: 1.2, 8: 0.8, 16: 0.7, 32: 0.6}}))
    assert found.autoscaling["target_ongoing_requests"] == 4.0
    assert found.k_per_batch == [[1, 7, 3], [8, 64, 0]]
    assert "no longer pays" in reason(found, "target_ongoing_requests").because


def test_a_draft_that_never_pays_is_not_served():
    for asked in ({}, {"arm": "bf16"}):
        found = of(cells({3: constant(0.8)}), **asked)
        assert (found.arm, found.k, found.k_per_batch, found.acceptance_length) == ("none", None, None, None)
    assert "pays at no load" in reason(found, "arm").because


def test_replicas_follow_the_load_or_the_machines():
    sweep = cells({3: constant(1.5)})
    assert {name: of(sweep, peak=100, trough=40).autoscaling[name] for name in ("min_replicas", "max_replicas")} == {"min_replicas": 3, "max_replicas": 7}
    found = of(sweep)
    assert (found.autoscaling["min_replicas"], found.autoscaling["max_replicas"]) == (1, 2)
    assert "hold 2" in reason(of(sweep, peak=100), "max_replicas").because
    with pytest.raises(ExperimentError, match="lowest load, 9"):
        of(sweep, peak=8, trough=9)


def test_delays_follow_the_start_of_an_engine_and_the_length_of_an_answer():
    found = of(cells({3: constant(1.5)}))
    assert (found.autoscaling["upscale_delay_s"], found.autoscaling["downscale_delay_s"]) == (12.0, 600.0)
    assert found.autoscaling["look_back_period_s"] == pytest.approx(5.0)  # 2.3 s of an answer, and at least 5
    unknown = recommend(cells({3: constant(1.5)}), Asked(), Ground())
    assert unknown.autoscaling["downscale_delay_s"] == 300 and "default" in reason(unknown, "downscale_delay_s").because


def test_the_fastest_arm_is_served_and_which_were_slower_is_told():
    sweep = cells({3: constant(1.5)}) + [each for each in cells({3: {1: 0.6, 4: 0.5}}, arm="fp8") if each["arm"] == "fp8"]
    found = of(sweep)
    assert found.arm == "bf16" and [each["arm"] for each in reason(found, "arm").cells] == ["bf16", "none", "fp8"]
    assert "concurrencies 1, 4" in reason(found, "arm").because


def test_invalid_cells_and_other_arms_decide_nothing():
    sweep = cells({3: constant(1.5)}) + cells({3: constant(3.0)}, arm="fp8")[18:]
    assert of(sweep).arm == "fp8" and of(sweep, arm="bf16").arm == "bf16"
    spoilt = [each | {"valid": False} if each["concurrency"] == 16 and each["arm"] == "bf16" else each for each in cells({3: constant(1.5)})]
    assert 16 not in {each["concurrency"] for each in reason(of(spoilt), "target_ongoing_requests").cells}
    with pytest.raises(MeasurementError, match="is valid"):
        of([each | {"valid": False} for each in sweep])


@pytest.mark.parametrize(("asked", "told"), [({"workload": "other"}, "no workload 'other'"), ({"arm": "fp8"}, "no arm fp8")])
def test_what_was_not_measured_is_refused(asked: dict, told: str):
    with pytest.raises(ExperimentError, match=told):
        of(cells({3: constant(1.5)}), **asked)


def test_several_workloads_are_told_apart():
    sweep = cells({3: constant(1.5)}) + [each | {"workload": "long"} for each in cells({3: constant(1.2)})]
    with pytest.raises(ExperimentError, match="2 workloads"):
        of(sweep)
    assert of(sweep, workload="long").workload == "long"


@pytest.mark.parametrize("speedups", [{3: constant(1.5)}, {3: constant(0.8)}, {1: constant(1.2), 7: {1: 1.8, 2: 1.5, 4: 1.2, 8: 1.0, 16: 0.8, 32: 0.6}}])
def test_what_is_recommended_is_what_an_experiment_takes_and_vllm_too(speedups: dict):
    found = of(cells(speedups), peak=50)
    section = ServeSection.model_validate(found.serve)
    assert section.autoscaling.max_replicas == found.autoscaling["max_replicas"]
    import yaml

    shown = "\n".join(lines(found))
    assert ServeSection.model_validate(yaml.safe_load(shown.split("\n\n")[0])["serve"]) == section
    if found.k_per_batch is not None:
        pytest.importorskip("vllm")
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        by_batch = build_dynamic_sd_schedule_lookup([tuple(each) for each in found.k_per_batch], 64, found.k)
        assert [by_batch[batch] for batch in (1, 4, 5, 64)] == [next(k for first, last, k in found.k_per_batch if first <= batch <= last) for batch in (1, 4, 5, 64)]


@pytest.mark.parametrize(("ranges", "told"), [([[2, 8, 3]], "not at 1"), ([[1, 8, 3], [8, 16, 1]], "does not come after 8"), ([[1, 8, 4]], "not from 0 to k = 3"),
                                              ([[1, 8, 0]], "drafts nothing"), ([[1, 0, 1]], "does not come after 0")])
def test_ranges_that_vllm_would_not_take_are_refused(ranges: list, told: str):
    with pytest.raises(ValueError, match=told):
        ServeSection.model_validate({"arm": "bf16", "k": 3, "k_per_batch": ranges})


def test_ranges_are_read_from_an_experiment_and_reach_the_engine(write_experiment):
    from raysd.deployment.options import llm_config
    from raysd.experiment import load_experiment
    from raysd.sweep.engine import engine_spec

    experiment = load_experiment(write_experiment(serve={"arm": "bf16", "k": 3, "k_per_batch": [[1, 8, 3], [9, 16, 1]], "autoscaling": {"acceptance_length": 2.5}}))
    config = llm_config(experiment, engine_spec(experiment, Path("/target"), Path("/draft"), 3), 8)
    assert config["engine_kwargs"]["speculative_config"]["num_speculative_tokens_per_batch_size"] == [[1, 8, 3], [9, 16, 1]]
    assert config["deployment_config"]["autoscaling_config"]["policy"]["policy_kwargs"] == {"acceptance_length": 2.5}
    plain = load_experiment(write_experiment(serve={"arm": "bf16", "k": 3}))
    config = llm_config(plain, engine_spec(plain, Path("/target"), Path("/draft"), 3), 8)
    assert "num_speculative_tokens_per_batch_size" not in config["engine_kwargs"]["speculative_config"] and "policy" not in config["deployment_config"]["autoscaling_config"]
