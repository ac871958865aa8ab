"""The stage as a whole: synthetic artifacts in, and what a reader finds in the files that come out."""

import base64
import dataclasses
import json
import math
import re
import shutil
from html.parser import HTMLParser

import pyarrow.parquet as pq
import pytest
from scipy import stats

from raysd.artifacts.record import encode_record, read_record
from raysd.errors import ArtifactError
from raysd.report.inputs import read_inputs
from raysd.report.report import report
from raysd.report.summaries import costs, points_of
from tests.report.conftest import write_cells

NO_BREAK = "\N{NO-BREAK SPACE}"


class Page(HTMLParser):
    """Text, references and table rows of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.references, self.rows, self._texts, self._skip, self._cell = [], [], [], 0, None
        self.tags = set()
        self.feed(source)
        self.text = " ".join(" ".join(self._texts).replace(NO_BREAK, " ").split())

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.references += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "poster", "data", "style")]
        if tag == "style":
            self._skip = 1
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell = ""

    def handle_endtag(self, tag):
        if tag == "style":
            self._skip = 0
        if tag in ("td", "th"):
            self.rows[-1].append(self._cell.replace(NO_BREAK, " "))
            self._cell = None

    def handle_data(self, data):
        if self._skip:
            self.references += re.findall(r"@import[^;]*|url\([^)]*\)", data)
            return
        self._texts.append(data)
        if self._cell is not None:
            self._cell += data


def page(run) -> Page:
    return Page((run.out / "report.html").read_text(encoding="utf-8"))


def markdown(run) -> str:
    return (run.out / "report.md").read_text(encoding="utf-8")


def interval(ratio: float, level: float = 0.05) -> list[float]:
    """The builder's blocks are ratio x (0.98, 1, 1.02)."""
    logs = [math.log(ratio * noise) for noise in (0.98, 1.0, 1.02)]
    half = stats.t.isf(level / 2, 2) * stats.sem(logs)
    return [math.exp(sum(logs) / 3 - half), math.exp(sum(logs) / 3 + half)]


def test_metrics_are_the_ratios_intervals_and_verdicts_of_the_first_k(demo):
    metrics = report(demo.run())
    centre = (0.98 * 1.02) ** (1 / 3)
    assert metrics["speedup"] == {
        "bf16": {c: pytest.approx(r * centre) for c, r in {"1": 1.3, "2": 1.2, "4": 1.05, "8": 0.9}.items()},
        "fp8": {"1": pytest.approx(0.5 * centre), "4": pytest.approx(0.4 * centre)},
    }
    assert metrics["speedup_ci_alone"]["bf16"]["1"] == pytest.approx(interval(1.3)) and metrics["speedup_ci_alone"]["fp8"]["4"] == pytest.approx(interval(0.4))
    # the farther from 1, the earlier in Holm's order: fp8 at 4 and 1, then bf16 at 1, 2, 8 and 4
    assert metrics["speedup_ci"]["fp8"]["4"] == pytest.approx(interval(0.4, 0.05 / 6)) and metrics["speedup_ci"]["fp8"]["1"] == pytest.approx(interval(0.5, 0.05 / 5))
    assert metrics["speedup_ci"]["bf16"] == {c: pytest.approx(interval(r, 0.05 / m)) for c, r, m in (("1", 1.3, 4), ("2", 1.2, 3), ("8", 0.9, 2), ("4", 1.05, 1))}
    assert metrics["verdict"] == {"bf16": {"1": "faster", "2": "faster", "4": "tie", "8": "slower"}, "fp8": {"1": "slower", "4": "slower"}}
    assert metrics["headline"] == (
        "At concurrency 1 the BF16 draft decodes 1.30× as fast as no draft (adjusted 95 % interval 1.17× to 1.44×, 3 blocks, k = 3); "
        "at concurrency 8 it turns into a loss (0.90×, 0.84× to 0.97×)."
    )


def test_the_page_and_the_markdown_say_the_same_numbers(demo):
    run = demo.run()
    metrics = report(run)
    shown = page(run)
    assert ["BF16 draft", "3", "1", "80.8", "105.0", "1.30×", "faster", "1.17× to 1.44×", "1.24× to 1.37×", "1.14×", "3"] in shown.rows
    assert ["FP8 draft", "3", "4", "181.8", "72.7", "0.40×", "slower", "0.35× to 0.45×", "0.38× to 0.42×", "1.17×", "3"] in shown.rows
    assert "| BF16 draft | 3 | 1 | 80.8 | 105.0 | 1.30× | faster | 1.17× to 1.44× | 1.24× to 1.37× | 1.14× | 3 |" in markdown(run)
    # medians over blocks of the builder's latencies: TTFT 40 + 5 c, TPOT 1000 c / rate at the middle block, E2EL 40 + 99 TPOT
    assert ["1", "no draft", "–", "45.0", "12.38", "1,265", "80.8", "84.8", "–", "3"] in shown.rows
    assert ["sweep, report split", "BF16 draft", "3", "10,000", "30,000", "8,000", "1.800"] in shown.rows
    assert ["BF16 draft", "2", "2,200", "10,000", "22.0 %", "21.2 % to 22.8 %", "4,800", "45.8 %"] in shown.rows
    assert ["FP8 draft", "48", "30", "18", "0"] in shown.rows
    assert ["450", "38.0 %", "33.1 %", "28.8 %", "1.500"] in shown.rows
    assert ["report", "BF16 draft", "180", "128", "40.0", "100.0"] in shown.rows
    for text in (shown.text, markdown(run).replace("\\", "")):
        assert metrics["headline"] in text
        assert "0.995 of the BF16 draft's (-0.5 %; expected within 3 %): as expected" in text
        assert "None of 96 answers differs from the baseline's by more than a near-tie of 0.25 nat. The largest gap is 0.125 nat." in text
        assert "covers 92.1 % of the held-out answer tokens" in text
        assert "predicts an acceptance length of 1.800 tokens per step (2,100 drafts); vLLM served 1.800 (2,000 drafts)" in text
        for stage, elapsed in (
            ("capture", "4 min 22 s"),
            ("train", "5 min 51 s"),
            ("quantize", "58.0 s"),
            ("sweep", "6 min 52 s"),
            ("sum", "18 min 3 s"),
        ):
            assert re.search(rf"{stage}[ |]+{elapsed}", text)


def test_losses_are_listed_and_fp8_on_cpu_is_explained_when_it_is_slower(demo):
    run = demo.run()
    report(run)
    text = page(run).text
    assert "Speculation loses at 3 of the 6 points that have an interval:" in text
    for line in (
        "BF16 draft, concurrency 8, k = 3: 0.90× (0.84× to 0.97×)",
        "FP8 draft, concurrency 1, k = 3: 0.50×",
        "FP8 draft, concurrency 4, k = 3: 0.40×",
    ):
        assert line in text
    assert "no FP8 matrix unit to use on this CPU, so FP8 products are emulated in float32" in text
    assert "FP8 keeps the acceptance (99.5 % of the BF16 draft's acceptance length); its speed needs a GPU." in text


@pytest.mark.parametrize(("hardware", "fp8"), [("mi355x", {1: 0.5, 4: 0.4}), ("cpu", {1: 1.4, 4: 1.2})])
def test_fp8_is_not_excused_elsewhere_or_when_it_is_fast(demo, hardware, fp8):
    demo.hardware, demo.ratios["fp8"] = hardware, fp8
    run = demo.run()
    report(run)
    assert "emulated in float32" not in page(run).text


def test_fp8_that_loses_acceptance_is_said_so(demo):
    demo.acceptance["fp8"] |= {"accepted": 100, "per_position": [90, 10, 0], "acceptance_length": 1 + 100 / 8000}
    run = demo.run()
    report(run)
    text = page(run).text
    assert (
        "FP8 changes the acceptance more than expected" in text
        and "outside what was expected" in text
        and "keeps the acceptance" not in text
    )


def test_wins_everywhere(demo):
    demo.ratios = {"bf16": {1: 1.5, 2: 1.4, 4: 1.3, 8: 1.2}}
    run = demo.run()
    metrics = report(run)
    assert metrics["headline"].endswith("3 blocks, k = 3), and no loss was measured up to concurrency 8.")
    assert "Speculation loses at none of the 4 points" in page(run).text


def test_loses_everywhere(demo):
    demo.ratios = {"bf16": {1: 0.9, 2: 0.8, 4: 0.7, 8: 0.6}}
    run = demo.run()
    metrics = report(run)
    assert metrics["headline"].startswith(
        "Speculation loses wherever an interval could be formed: the best, the BF16 draft at concurrency 1, decodes 0.90×"
    )
    assert "Speculation loses at every point that has an interval (4 of 4):" in page(run).text


def test_ties_everywhere_are_no_speedup(demo):
    demo.ratios = {"bf16": {1: 1.03, 2: 1.01, 4: 1.0, 8: 0.99}}
    metrics = report(demo.run())
    assert metrics["headline"].startswith(
        "No speed-up was found: the best, the BF16 draft at concurrency 1, is a tie with no draft at 1.03×"
    )


def test_a_point_that_is_a_tie_only_among_many_says_how_many_blocks_would_tell(demo):
    demo.ratios = {"bf16": {1: 1.5, 2: 1.055, 4: 1.055, 8: 1.0}}
    run = demo.run()
    metrics = report(run)
    assert metrics["verdict"]["bf16"] == {"1": "faster", "2": "tie", "4": "tie", "8": "tie"}
    assert metrics["speedup_ci_alone"]["bf16"]["2"][0] > 1 > metrics["speedup_ci"]["bf16"]["2"][0]
    assert "At 2 of 4 points the interval by itself does not hold 1, but the adjusted one does, so it is called a tie" in page(run).text
    assert "found four times in five: BF16 draft, concurrency 2, k = 3, with 5 blocks; BF16 draft, concurrency 4, k = 3, with 5 blocks." in page(run).text


def test_invalid_cells_are_left_out_and_listed_with_their_reasons(demo):
    demo.invalid = {("bf16", 8, 2): ["2 of 32 requests failed", "achieved concurrency 91 %"], ("none", 4, 0): ["the engine restarted"]}
    run = demo.run()
    metrics = report(run)
    assert metrics["speedup"]["bf16"]["8"] == pytest.approx(0.9 * math.sqrt(0.98))
    assert (
        metrics["speedup_ci"]["bf16"] | {"1": 0, "2": 0} == {"1": 0, "2": 0, "4": None, "8": None}
        and metrics["verdict"]["bf16"]["8"] is None
    )
    assert metrics["speedup_ci"]["fp8"]["4"] is None
    shown = page(run)
    assert ["BF16 draft", "report", "8", "3", "3", "2 of 32 requests failed; achieved concurrency 91 %"] in shown.rows
    assert ["no draft", "report", "4", "–", "1", "the engine restarted"] in shown.rows
    assert "28 of 30 cells are valid" in shown.text
    assert "BF16 draft, concurrency 8, k = 3: 2 valid pairs, fewer than 3, so no interval is given" in shown.text


@pytest.mark.parametrize("ratios", [{1: 1e200, 2: 1e-200, 4: 1.05, 8: 0.9}, {1: 1e300, 2: 1e-300, 4: 1e200, 8: 1e4}])
def test_points_that_cannot_be_drawn_are_in_the_tables_all_the_same(demo, ratios):
    demo.ratios = {"bf16": ratios}
    run = demo.run()
    metrics = report(run)
    assert metrics["speedup"]["bf16"]["2"] == pytest.approx(ratios[2] * (0.98 * 1.02) ** (1 / 3))
    assert f"{metrics['speedup']['bf16']['1']:.2e}×" in page(run).text and f"{metrics['speedup']['bf16']['2']:.2e}×" in page(run).text
    assert all((run.out / f"{name}.png").stat().st_size > 0 for name in ("speedup", "pareto", "latency"))
    json.dumps(metrics, allow_nan=False)


def test_ratios_that_scatter_beyond_what_a_float_holds_have_ends_all_the_same(demo):
    demo.ratios, cells = {"bf16": {1: 1.0, 2: 1.2, 4: 1.05, 8: 0.9}}, demo.cells
    demo.nodes = {"node-a": 1.0, "node-b": 1.0, "node-c": 1.0}
    demo.cells = lambda: [cell | ({"output_tok_s": (1e-300, 1.0, 1e300)[cell["block"]]} if (cell["arm"], cell["concurrency"]) == ("bf16", 1) else {}) for cell in cells()]
    metrics = report(demo.run())
    low, high = metrics["speedup_ci"]["bf16"]["1"]
    assert 0 < low < 1e-300 and 1e300 < high < math.inf and metrics["verdict"]["bf16"]["1"] == "tie"


def test_without_a_valid_pair_nothing_is_claimed(demo):
    demo.invalid = {("none", concurrency, block): ["the engine did not start"] for concurrency in (1, 2, 4, 8) for block in range(3)}
    run = demo.run()
    metrics = report(run)
    assert metrics["headline"].endswith("so there is no speed-up to report.") and metrics["speedup"]["bf16"]["1"] is None
    assert (run.out / "speedup.png").stat().st_size > 0


def test_two_blocks_give_a_ratio_without_a_claim(demo):
    demo.blocks = 2
    metrics = report(demo.run())
    assert metrics["speedup"]["bf16"]["1"] == pytest.approx(1.3 * math.sqrt(0.98)) and metrics["speedup_ci"]["bf16"]["1"] is None
    assert metrics["headline"].endswith("(2, k = 3), so there is no interval and nothing is claimed.")


def test_the_summary_is_one_screen_in_the_shape_of_amds_table(demo):
    demo.hardware, demo.tensor_parallel, demo.invalid = "mi355x", 4, {("none", 8, block): ["the engine died"] for block in range(3)}
    run = demo.run()
    metrics = report(run)
    summary = (run.out / "summary.md").read_text(encoding="utf-8").replace("\\", "")
    assert "| Concurrency (requests) | No draft (output tok/s/GPU) | BF16 draft (output tok/s/GPU) | × (BF16 draft / no draft) |" in summary
    rates = [180 * (1 + 0.01 * block) for block in range(3)]
    none, bf16 = stats.gmean(rates) / 4, stats.gmean([rate * 1.05 * noise for rate, noise in zip(rates, (0.98, 1.0, 1.02), strict=True)]) / 4
    assert f"| 4 | {none:.1f} | {bf16:.1f} | 1.05× (tie) | {none * 0.4 * (0.98 * 1.02) ** (1 / 3):.1f} | 0.40× |" in summary
    assert "| 8 | – |" in summary and "| invalid | – | not run |" in summary
    assert f"**{metrics['headline']}**" in summary and "27 of 30 cells are valid; 0 requests failed." in summary and len(summary.splitlines()) < 40


def summary_of(run) -> str:
    return (run.out / "summary.md").read_text(encoding="utf-8").replace("\\", "")


def test_the_headline_names_its_workload_and_tells_of_gains_and_losses_on_the_others(demo):
    demo.ratios, demo.others = {"bf16": {1: 1.3, 2: 1.2, 4: 1.05, 8: 0.9}}, {"second": 0.4}
    run = demo.run()
    metrics = report(run)
    assert metrics["headline"].startswith("Workload report: at concurrency 1 the BF16 draft decodes 1.30× as fast as no draft (")
    assert metrics["headline"].endswith(" On the other workload, second, speculation is slower at 4 points (down to 0.36×).")
    assert metrics["headline"] in summary_of(run) and metrics["headline"] in page(run).text
    assert "| report | BF16 draft | 3 | 2 | 1 | 1 | 0 | 1.30× at 1 | 0.90× at 8 |" in summary_of(run) and "| second | BF16 draft | 3 | 0 | 4 | 0 | 0 | 0.52× at 1 | 0.36× at 8 |" in summary_of(run)
    assert "at concurrency 1 of workload report, " in page(run).text


def test_a_first_workload_without_a_valid_cell_says_nothing_of_the_others(demo):
    demo.invalid = {(arm, concurrency, block): ["no"] for arm in ("none", "bf16", "fp8") for concurrency in (1, 2, 4, 8) for block in range(3)}
    demo.ratios, demo.others = {"bf16": {1: 2, 2: 2, 4: 2, 8: 0.5}}, {"a": 1.0, "b": 2.0, "c": 0.25, "d": 0.5}
    run = demo.run()
    assert report(run)["headline"] == (
        "Workload report: no drafting arm has a block in which it and the baseline are both valid, so there is no speed-up to report. On the other 4 workloads speculation is "
        "faster at 6 points of a and b (up to 4.00×), slower at 6 points of a, c and d (down to 0.12×) and a tie at 4 points of b and d."
    )
    assert "| report | BF16 draft | 3 | 0 | 0 | 0 | 4 | – | – |" in summary_of(run)
    assert [row for row in ("a", "b", "c", "d") if f"| {row} | BF16 draft | 3 |" in summary_of(run)] == ["a", "b", "c", "d"]


def test_a_headline_counts_workloads_that_are_too_many_to_name_and_tells_of_what_is_undecided(demo):
    demo.ratios, demo.blocks, demo.others = {"bf16": {1: 1.3, 2: 1.2, 4: 1.05, 8: 0.9}}, 2, dict.fromkeys("abcd", 1.0)
    assert report(demo.run())["headline"].endswith(" On the other 4 workloads speculation is without a verdict at 16 points of 4 workloads.")


def test_synthetic_acceptance_is_said_before_any_number(demo):
    demo.hardware, demo.synthetic = "mi355x", [0.8, 0.6, 0.4]
    run = demo.run()
    report(run)
    text = page(run).text
    assert text.index("Synthetic acceptance: the engines were told") < text.index("1.30×")
    assert "> **Synthetic acceptance:" in markdown(run) and "> **Synthetic acceptance:" in (run.out / "summary.md").read_text(encoding="utf-8")


def test_what_not_every_sweep_has_is_shown_where_it_is_and_else_not_there(demo, tmp_path):
    demo.told_by_request, demo.blocks = True, 6
    demo.nodes = {"node-a": 1.0, "node-b": 1.01, "node-c": 0.8}
    demo.usd_per_hour = 8.4
    demo.metered = {"energy_j": 3000.0, "client_cpu_frac": 0.25, "loop_lag_ms_p99": 0.31, "dispatch_delay_ms_p99": 0.12}
    demo.invalid = {("bf16", 1, 0): ["a request failed"]}
    run = demo.run()
    report(run)
    shown = page(run)
    assert "node-c (-16.5 %)" in shown.text and "stands apart from the others" in shown.text
    assert next(row for row in shown.rows if row[0] == "node-c")[3:] == ["2", "20", "0", "stands apart"]
    assert next(row for row in shown.rows if row[0] == "node-a")[3:] == ["2", "19", "1", "alike"]
    # 3000 J a cell of 400 tokens; 8.4 USD/h over the 400 tokens at the rate of the cell
    rates = [80 * (1 + 0.01 * block) * (1.0, 1.01, 0.8)[block % 3] for block in range(6)]
    usd = 8.4 / 3600 * sum(400 / rate for rate in rates) / 2400 * 1e6
    assert ["1", "no draft", "–", "7.500", f"{usd:.2f}", "6"] in shown.rows
    # a request of the category code had 30 + 10 + 5 tokens accepted of 50 drafts, one of chat 20 + 10 + 5
    assert ["code", "BF16 draft", "3", "1.900", "1.90 to 1.90", "1,150", "1,035"] in shown.rows and ["chat", "BF16 draft", "3", "1.700", "1.70 to 1.70", "1,150", "805"] in shown.rows
    assert "In the worst valid cell the client took at most 25.0 % of a core, was at most 0.31 ms late in its own loop (p99) and sent requests at most 0.12 ms late (p99)." in shown.text


def test_acceptance_under_load_is_by_concurrency_and_position(demo):
    run = demo.run()
    report(run)
    # a cell at concurrency 4 counts 800 drafts, of which 48, 22 and 10 % are accepted at the three positions; three blocks
    assert ["4", "BF16 draft", "3", "1.800", "1.80 to 1.80", "2,400", "1,920", "48 / 22 / 10"] in page(run).rows


def test_sections_of_what_was_not_measured_are_left_out(demo):
    run = demo.run()
    report(run)
    text = page(run).text
    for absent in ("Energy and cost", "Nodes", "by category", "In the worst valid cell the client", "Synthetic"):
        assert absent not in text


def test_latencies_are_distributions_over_requests(demo):
    run = demo.run()
    report(run)
    # requests are 10 % below and above the medians of their cells: TTFT 45 at concurrency 1, TPOT 1000 / 80, 1000 / 80.8 and 1000 / 81.6
    tpots = sorted(share * 1000 / (80 * (1 + 0.01 * block)) for block in range(3) for share in (0.9, 1.1))
    middle = (tpots[2] + tpots[3]) / 2
    row = next(row for row in page(run).rows if row[:3] == ["1", "no draft", "–"] and len(row) == 7)
    assert row[3] == "45 / 50 / 50" and row[4].startswith(f"{middle:.1f} / ") and row[6] == "6"
    assert ["BF16 draft", "3", "1", f"{80.8 * 1.3:.1f}", f"{80.8 * 1.3:.1f}", "3"] in page(run).rows  # at concurrency 1 a user has all of it


def test_the_drafts_are_compared_with_each_other(demo):
    run = demo.run()
    report(run)
    assert "Against the BF16 draft in the same blocks, the FP8 draft is slower at 2 of 2 points." in page(run).text
    # both ratios have the same noise, which cancels
    assert next(row for row in page(run).rows if row[:3] == ["FP8 draft", "3", "4"] and row[6] == "slower" and row[5] == "0.38×")[3:5] == [f"{181.8 * 1.05:.1f}", "72.7"]


def test_a_sweep_until_its_intervals_are_narrow_says_whether_they_are(demo):
    demo.until_ci, demo.blocks = 0.05, 6
    run = demo.run()
    metrics = report(run)
    assert "every interval got there. The spread and degrees of freedom are those of the blocks that decided" in page(run).text
    logs = [math.log(1.3 * noise) for noise in (0.98, 1.0, 1.02, 0.98, 1.0, 1.02)]
    half = stats.t.isf(0.025, 4) * stats.tstd(logs[:5]) / math.sqrt(6)
    assert metrics["speedup_ci_alone"]["bf16"]["1"] == pytest.approx([math.exp(stats.tmean(logs) - half), math.exp(stats.tmean(logs) + half)])


def test_a_sweep_that_ended_at_a_limit_says_what_is_still_wide(demo):
    demo.until_ci, demo.blocks = 0.01, 5
    run = demo.run()
    report(run)
    assert "a limit of blocks or time ended the sweep before these got there: BF16 draft, concurrency 1, k = 3: 2." in page(run).text


def test_broken_answers_are_said_plainly(demo):
    demo.lossless["fp8"] = {"equal": 30, "near_tie": 17, "broken": 1}
    run = demo.run()
    report(run)
    assert "1 of 96 answers differ from the baseline's by more than a near-tie: those arms are not lossless here." in page(run).text


def test_a_finished_checkpoint_has_no_training_section_and_says_so(demo):
    demo.trained = False
    run = demo.run()
    report(run)
    shown = page(run)
    assert "The draft is a finished checkpoint (draft.checkpoint), so there is no training to show." in shown.text
    assert "Replayed AL" not in shown.text and "train, choose split" not in shown.text and (run.out / "training.png").exists()


def test_a_capture_that_was_a_part_of_training_is_told_of_in_its_row(demo):
    run = demo.run()
    captured, trained = (read_record(run.inputs[stage]) for stage in ("capture", "train"))
    del run.inputs["capture"]
    both = trained.model_copy(update={"metrics": trained.metrics | {"capture": captured.metrics}})
    (run.inputs["train"].parent / "record.json").write_bytes(encode_record(both))
    report(run)
    rows = {row[0]: row for row in page(run).rows if row}
    assert "capture" not in rows and "900 steps" in rows["train"][-1]
    assert "captured meanwhile: 1,050 conversations, 145,000 output tokens, 674 output tok/s" in rows["train"][-1]
    assert "Captured hidden states against Hugging Face's" in page(run).text and rows["15"] == ["15", "0.006"]


def test_metrics_are_of_the_first_k_and_the_table_holds_every_k(demo):
    demo.ks = [2, 3]
    run = demo.run()
    metrics = report(run)
    assert set(metrics["speedup"]["bf16"]) == {"1", "2", "4", "8"} and "k = 2)" in metrics["headline"]
    assert {row[1] for row in page(run).rows if row[0] == "BF16 draft" and len(row) == 11} == {"2", "3"}


def test_the_page_needs_nothing_from_outside_itself(demo):
    run = demo.run()
    report(run)
    shown = page(run)
    pictures = [reference for reference in shown.references if reference.startswith("data:image/png;base64,")]
    assert [base64.b64decode(picture.split(",", 1)[1]) for picture in pictures] == [
        (run.out / name).read_bytes() for name in ("speedup.png", "pareto.png", "latency.png", "acceptance.png", "load_acceptance.png", "training.png")
    ]
    assert all(reference.startswith(("data:", "#")) for reference in shown.references)
    assert not shown.tags & {"script", "iframe", "object", "embed", "base"}


def test_names_that_hold_markup_stay_names(demo):
    demo.target = "org/<script>alert(1)<script>|a"
    demo.invalid = {("fp8", 1, 0): ["</td><img src=http://example.invalid/x>"]}
    run = demo.run()
    report(run)
    shown = page(run)
    assert "script" not in shown.tags and "<script>alert(1)<script>|a" in shown.text
    assert all(reference.startswith(("data:", "#")) for reference in shown.references)
    assert r"\<script\>alert(1)\<script\>\|a" in markdown(run)


def test_folders_of_the_machine_are_not_in_the_report(demo):
    demo.target = "/home/somebody/models/my-target"
    run = demo.run()
    report(run)
    assert "my-target on CPU" in page(run).text and "/home/somebody" not in page(run).text


def test_the_same_artifacts_give_the_same_bytes(demo, tmp_path, drawn):
    run = demo.run()
    drawn.clear()
    report(run)
    drawn.clear()
    again = dataclasses.replace(run, out=tmp_path / "again")
    again.out.mkdir()
    report(again)
    assert {path.name: path.read_bytes() for path in run.out.iterdir()} == {path.name: path.read_bytes() for path in again.out.iterdir()}


@pytest.mark.parametrize("damage", ["no sweep", "no record", "no cells", "no column", "no parquet", "empty"])
def test_inputs_that_cannot_be_read_are_named(demo, damage):
    run = demo.run()
    cells = run.inputs["sweep"] / "cells"
    if damage == "no sweep":
        run = dataclasses.replace(run, inputs={})
    elif damage == "no record":
        (run.inputs["sweep"].parent / "record.json").unlink()
    elif damage == "no cells":
        shutil.rmtree(cells)
    elif damage == "no column":
        rows = [{name: value for name, value in row.items() if name != "ttft_ms_p50"} for row in demo.cells()]
        shutil.rmtree(cells)
        write_cells(cells, rows)
    elif damage == "no parquet":
        for path in cells.rglob("*.parquet"):
            path.write_bytes(b"not parquet at all")
    else:
        for path in cells.rglob("*.parquet"):
            pq.write_table(pq.ParquetFile(path).read().slice(0, 0), path)
    expected = {
        "no sweep": "no sweep",
        "no record": "no record",
        "no cells": "missing",
        "no column": "ttft_ms_p50",
        "no parquet": "not Parquet",
        "empty": "no cell",
    }
    with pytest.raises(ArtifactError, match=expected[damage]):
        report(run)
    assert list(run.out.iterdir()) == []


def test_a_price_in_the_experiment_makes_tokens_cost_something(demo):
    run = demo.run()
    points = points_of(read_inputs(run.experiment, run.inputs).cells, "report", run.experiment.sweep.arms)
    of_none = [costs(points, None), costs(points, 5.76)]
    assert of_none[0] == [] and of_none[1][0].arm == "none"
    cells = [cell for cell in demo.cells() if cell["arm"] == "none" and cell["concurrency"] == of_none[1][0].concurrency]
    expected = 5.76 / 3600 * sum(cell["elapsed_s"] for cell in cells) / sum(cell["output_tokens"] for cell in cells) * 1e6
    assert of_none[1][0].usd_per_million_output_tokens == pytest.approx(expected) and of_none[1][0].joules_per_output_token is None
