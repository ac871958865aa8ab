"""The stage `report`: measured artifacts in, a report that a person can open out."""

from __future__ import annotations

from typing import Any

from raysd.artifacts.stage import StageRun
from raysd.report import sections, summaries
from raysd.report.findings import headline
from raysd.report.html import render_html
from raysd.report.inputs import Inputs, read_inputs
from raysd.report.load_pictures import draw_acceptance_under_load, draw_latency, draw_pareto
from raysd.report.markdown import render_markdown
from raysd.report.pictures import draw_acceptance, draw_speedup, draw_training
from raysd.report.tables import baseline_rates
from raysd.sweep.published import published_acceptance
from raysd.sweep.sequential import pilot_pairs
from raysd.sweep.statistics import Interval, Speedup, speedups

SUMMARY = "summary.md"


def report(run: StageRun) -> dict[str, Any]:
    """Writes report.html, report.md, summary.md (one screen of it) and the pictures.

    Inputs: `sweep`; `capture`, `train` and `quantize` where the experiment has them. Metrics, of the first workload and the first k:
    `speedup` (arm to concurrency to ratio of output tokens per second, null without a pair of valid cells), `speedup_ci` (arm to concurrency to
    [low, high], Holm-adjusted over all comparisons of the sweep, null below 3 pairs), `speedup_ci_alone` (likewise, each comparison by itself), `verdict`
    (arm to concurrency to `faster`, `slower`, `tie` or null, by `speedup_ci`) and `headline`, which tells of the other workloads, too.
    Raises ArtifactError for an input that cannot be read, MeasurementError for numbers that contradict themselves.
    """
    run.progress("reading the measurements", 0, 3)
    inputs = read_inputs(run.experiment, run.inputs)
    section = inputs.experiment.sweep
    compared = speedups(inputs.cells, pilot_pairs(section.blocks, section.until_ci))
    shown = sections.primary(inputs, compared)
    run.progress("drawing", 1, 3)
    _draw(run, inputs, compared)
    run.progress("writing the report", 2, 3)
    document = sections.build_document(inputs, compared)
    (run.out / "report.html").write_text(render_html(document, run.out), encoding="utf-8")
    (run.out / "report.md").write_text(render_markdown(document), encoding="utf-8")
    (run.out / SUMMARY).write_text(render_markdown(sections.summary_document(inputs, compared)), encoding="utf-8")
    run.progress("writing the report", 3, 3)
    return _metrics(shown, compared)


def _draw(run: StageRun, inputs: Inputs, compared: list[Speedup]) -> None:
    subtitle = sections.conditions(inputs)
    sweep = run.experiment.sweep
    workload = inputs.workloads[0]
    blocks = len({cell["block"] for cell in inputs.cells})
    first = [speedup for speedup in compared if speedup.workload == workload]
    ks = ", ".join(str(k) for k in sorted({speedup.k for speedup in first}))
    draw_speedup(
        first,
        baseline_rates(inputs.cells, workload),
        f"{subtitle} · k = {ks} · {blocks} blocks, 95 % intervals",
        run.out / sections.SPEEDUP_PNG,
    )
    acceptance = inputs.sweep_metrics.get("acceptance", {})
    draw_acceptance(acceptance, f"{subtitle} · report split, 95 % intervals", run.out / sections.ACCEPTANCE_PNG)
    points = summaries.points_of(inputs.cells, workload, inputs.arms)
    measured_at = f"{subtitle} · workload {workload}"
    draw_pareto(summaries.operating_points(points, inputs.devices), inputs.per_device, f"{measured_at} · medians of {blocks} blocks", run.out / sections.PARETO_PNG)
    draw_latency(sections.latency_spreads(inputs, workload), measured_at, run.out / sections.LATENCY_PNG)
    draw_acceptance_under_load(summaries.acceptance_by_concurrency(points), summaries.acceptance_by_category(inputs.requests, workload),
                               published_acceptance(run.experiment.target.model, sweep.k[0]) if sweep.acceptance.words == "real" else {},
                               f"{measured_at}, 95 % intervals", run.out / sections.LOAD_ACCEPTANCE_PNG)
    draw_training(inputs.curve, inputs.evaluations, inputs.candidates, subtitle.rsplit(",", 1)[0], run.out / sections.TRAINING_PNG)


def _metrics(shown: list[Speedup], of_sweep: list[Speedup]) -> dict[str, Any]:
    metrics: dict[str, Any] = {"speedup": {}, "speedup_ci": {}, "speedup_ci_alone": {}, "verdict": {}, "headline": headline(shown, of_sweep)}
    for speedup in shown:
        at, compared = str(speedup.concurrency), speedup.compared
        metrics["speedup"].setdefault(speedup.arm, {})[at] = compared.ratio if compared else None
        metrics["speedup_ci"].setdefault(speedup.arm, {})[at] = _listed(speedup.interval)
        metrics["speedup_ci_alone"].setdefault(speedup.arm, {})[at] = _listed(compared.interval if compared else None)
        metrics["verdict"].setdefault(speedup.arm, {})[at] = speedup.verdict
    return metrics


def _listed(interval: Interval | None) -> list[float] | None:
    return None if interval is None else list(interval)
