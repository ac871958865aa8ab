"""What a run came to, for programs and for people, read from its records."""

from __future__ import annotations

from typing import Any

from raysd.pipeline.display import clock_time
from raysd.pipeline.runner import RunOutcome

REPORT = "report.html"


def summarize(experiment: str, outcome: RunOutcome, elapsed_s: float) -> dict[str, Any]:
    """The object that `raysd run --json` prints. Figures are empty, and the report null, where a run did not get so far.

    acceptance_length: arm to tokens per verify step over the report split; speedup, speedup_ci, speedup_ci_alone, verdict: arm to concurrency to ratio, [low, high]
    adjusted for all comparisons of the sweep, [low, high] of each by itself, and what the adjusted one says; all for the first workload and the first k.
    """
    made = {result.stage.name: result for result in outcome.stages if result.record is not None}
    sweep, report = (made[name].record.metrics if name in made else {} for name in ("sweep", "report"))
    return {
        "experiment": experiment,
        "elapsed_s": round(elapsed_s, 1),
        "stages": [result.as_json() for result in outcome.stages],
        "acceptance_length": {arm: counts["acceptance_length"] for arm, counts in sweep.get("acceptance", {}).items()},
        "speedup": report.get("speedup", {}),
        "speedup_ci": report.get("speedup_ci", {}),
        "speedup_ci_alone": report.get("speedup_ci_alone", {}),
        "verdict": report.get("verdict", {}),
        "lossless": sweep.get("lossless", {}),
        "report": f"{made['report'].artifact}/{made['report'].record.folder}/{REPORT}" if "report" in made else None,
    }


def render(summary: dict[str, Any]) -> str:
    """The summary as text for a terminal."""
    rows = [["stage", "state", "elapsed", "fingerprint"]]
    rows += [[entry["stage"], entry["state"], clock_time(entry["elapsed_s"]), entry["fingerprint"][:12]] for entry in summary["stages"]]
    lines = [f"{summary['experiment']} in {clock_time(summary['elapsed_s'])}", "", *table(rows)]
    if summary["acceptance_length"]:
        lines += [
            "",
            "acceptance length (tokens per verify step, report split)",
            *_indented(f"{arm}  {value:.3f}" for arm, value in summary["acceptance_length"].items()),
        ]
    if summary["speedup"]:
        rows = [["arm", "concurrency", "speed-up of output_tok_s", "verdict", "adjusted 95 % interval", "by itself"]]
        for arm, ratios in summary["speedup"].items():
            for concurrency, ratio in ratios.items():
                rows.append(
                    [
                        arm,
                        concurrency,
                        "not measured" if ratio is None else f"{ratio:.2f}x",
                        summary["verdict"].get(arm, {}).get(concurrency) or "not tested",
                        *(_interval(summary[name].get(arm, {}).get(concurrency)) for name in ("speedup_ci", "speedup_ci_alone")),
                    ]
                )
        lines += ["", *table(rows)]
    if summary["lossless"]:
        rows = [["answers against the baseline's", "equal", "near-tie", "broken"]]
        rows += [[arm, str(counts["equal"]), str(counts["near_tie"]), str(counts["broken"])] for arm, counts in summary["lossless"].items()]
        lines += ["", *table(rows)]
    if summary["report"]:
        lines += ["", f"report: {summary['report']}"]
        if summary["report"].startswith("s3://"):
            lines.append("(`raysd report` fetches it, and prints the path of the copy)")
    return "\n".join(lines)


def _interval(bounds: list[float] | None) -> str:
    return f"{bounds[0]:.2f} to {bounds[1]:.2f}" if bounds else "none"


def table(rows: list[list[str]]) -> list[str]:
    """Rows of text in columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _indented(lines: Any) -> list[str]:
    return [f"  {line}" for line in lines]
