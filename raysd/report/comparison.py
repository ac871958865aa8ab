"""The comparison of two sweeps as a document, for the page, for Markdown and for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from raysd.errors import ArtifactError
from raysd.report import formats
from raysd.report.compare import Compared, Comparison, Point, as_json
from raysd.report.comparison_picture import draw_comparison
from raysd.report.document import Block, Bullets, Column, Document, Paragraph, Picture, Section, Table, Tile, Value
from raysd.report.html import render_html
from raysd.report.markdown import render_markdown
from raysd.report.tables import VERDICT_TONES
from raysd.sweep.statistics import MIN_PAIRS

COMPARISON_PNG = "comparison.png"


def build_comparison(comparison: Comparison) -> Document:
    """The whole comparison as data; its picture lies beside it."""
    return Document(
        title="Two sweeps compared",
        subtitle=f"A: {comparison.a} · B: {comparison.b}",
        headline=headline(comparison),
        warnings=[f"The two differ in {name}: {a} in A, {b} in B." if a != b else f"The two differ in {name}: {a} in both, with other content."
                  for name, (a, b) in comparison.differing.items() if name != "engine"]
        + (["The two differ in engine settings; they are listed below."] if "engine" in comparison.differing else []),
        tiles=_tiles(comparison.rates),
        sections=[
            Section("rates", "Rates", [Picture(
                COMPARISON_PNG, f"B over A at every common point. {headline(comparison)}",
                "Adjusted 95 % intervals; a filled point is faster or slower, a hollow one a tie, or was not tested. The horizontal axes are logarithmic."),
                _table(comparison.rates, "Output tokens per second, B against A", "output tok/s", 1)]),
            *([Section("speedups", "Speed-ups", [_table(comparison.speedups, "Speed-up over no draft, B against A", "ratio", 2)])] if comparison.speedups else []),
            Section("conditions", "Conditions", _conditions(comparison)),
        ],
        footer="Ratios are B / A. Blocks of two sweeps are not paired: Welch's t on logarithms, Holm-adjusted within each table. A sweep's own state that day shifts all "
        "its rates alike, and no interval over blocks shows it; speed-ups are ratios within a sweep and are free of it.",
    )


def write_comparison(comparison: Comparison, document: Document, folder: Path) -> None:
    """Writes comparison.html, comparison.md, comparison.json and the picture. Raises ArtifactError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_comparison(comparison, folder / COMPARISON_PNG)
        (folder / "comparison.html").write_text(render_html(document, folder), encoding="utf-8")
        (folder / "comparison.md").write_text(render_markdown(document), encoding="utf-8")
        (folder / "comparison.json").write_text(json.dumps(as_json(comparison), indent=1), encoding="utf-8")
    except OSError as err:
        raise ArtifactError(what=f"the comparison cannot be written: {err.strerror}", where=folder, fix="name a folder that can be written") from err


def headline(comparison: Comparison) -> str:
    """One sentence: at how many points B is faster, slower, or neither."""
    tested = [each for each in comparison.rates if each.verdict]
    if not tested:
        return f"None of {formats.plural(len(comparison.rates), 'common point')} has {MIN_PAIRS} valid blocks in both sweeps, so nothing is claimed."
    counts = {name: sum(each.verdict == name for each in tested) for name in ("faster", "slower", "tie")}
    said = ", ".join(f"{words} at {counts[name]}" for name, words in (("faster", "faster"), ("slower", "slower"), ("tie", "a tie")) if counts[name])
    gains = [each for each in comparison.speedups if each.verdict]
    moved = [each for each in gains if each.verdict != "tie"]
    drafts = "" if not gains else (f" What a draft gains over no draft differs at {len(moved)} of {len(gains)}." if moved else f" What a draft gains over no draft is a tie at all {len(gains)}.")
    return f"Of {formats.plural(len(tested), 'point')}, B is {said}.{drafts}"


def text_tables(comparison: Comparison) -> list[list[list[str]]]:
    """The tables as rows of text, heads first, for a terminal: rates, and speed-ups where there are any."""
    head = ["workload", "arm", "k", "concurrency", "A", "B", "B / A", "verdict", "adjusted 95 % interval", "blocks"]
    tables = []
    for name, compared, digits in (("output_tok_s", comparison.rates, 1), ("speed-up", comparison.speedups, 2)):
        rows = [[each.point[0], each.point[2], formats.count(each.point[3]), str(each.point[4]), formats.decimal(each.a, digits), formats.decimal(each.b, digits),
                 formats.ratio(each.ratio.ratio if each.ratio else None), each.verdict or _untested(each), formats.interval(each.interval), f"{each.a_blocks}, {each.b_blocks}"] for each in compared]
        if rows:
            tables.append([[*head[:4], f"A, {name}", f"B, {name}", *head[6:]], *rows])
    return tables


def left_out(comparison: Comparison) -> list[str]:
    """One line for each side that has points which the other has not."""
    return [f"only in {name}, or defined otherwise there: {'; '.join(_where(point) for point in points)}" for name, points in (("A", comparison.only_a), ("B", comparison.only_b)) if points]


def _tiles(rates: Sequence[Compared]) -> list[Tile]:
    tones = {"faster": "good", "slower": "bad", "tie": "plain"}
    return [Tile(f"B is {'a tie' if name == 'tie' else name}", str(sum(each.verdict == name for each in rates)), f"of {len(rates)} common points", tone if any(each.verdict == name for each in rates) else "plain")
            for name, tone in tones.items()]


def _table(compared: Sequence[Compared], title: str, unit: str, digits: int) -> Table:
    rows: list[list[str | Value]] = []
    for each in compared:
        workload, _, arm, k, concurrency = each.point
        tone = VERDICT_TONES[each.verdict]
        rows.append([workload, formats.arm_name(arm), formats.count(k), str(concurrency), formats.decimal(each.a, digits), formats.decimal(each.b, digits),
                     Value(formats.ratio(each.ratio.ratio if each.ratio else None), tone), Value(each.verdict or _untested(each), tone), formats.interval(each.interval),
                     formats.interval(each.ratio.interval if each.ratio else None), formats.ratio(each.ratio.detectable_ratio(each.level) if each.ratio else None),
                     f"{each.a_blocks}, {each.b_blocks}"])
    columns = [Column("Workload", numeric=False), Column("Arm", numeric=False), Column("k", "tokens"), Column("Concurrency", "requests"), Column("A", unit), Column("B", unit),
               Column("B / A", "ratio"), Column("Verdict", "of B", numeric=False), Column("Adjusted interval", "95 %, all at once"), Column("Own interval", "95 %, by itself"),
               Column("Detectable", "from, ratio"), Column("Blocks", "A, B")]
    return Table(title, columns, rows, "A and B are geometric means over valid blocks. A tie is an adjusted interval that holds 1.")


def _untested(each: Compared) -> str:
    return "invalid" if each.ratio is None else f"under {MIN_PAIRS} blocks"


def _conditions(comparison: Comparison) -> list[Block]:
    rows: list[list[str | Value]] = [[name, Value(a, "bad"), Value(b, "bad")] for name, (a, b) in comparison.differing.items()]
    rows += [[name, shown, shown] for name, shown in comparison.same.items()]
    blocks: list[Block] = [Table("Conditions of the two", [Column("Condition", numeric=False), Column("A", numeric=False), Column("B", numeric=False)], rows, "Differing ones first.")] if rows else []
    if comparison.unknown:
        blocks.append(Paragraph(f"Not known of both, and so not compared: {', '.join(comparison.unknown)}."))
    for name, points in (("A", comparison.only_a), ("B", comparison.only_b)):
        if points:
            blocks += [Paragraph(f"Only in {name}, or defined otherwise there:"), Bullets([_where(point) for point in points])]
    return blocks


def _where(point: Point) -> str:
    workload, osl, arm, k, concurrency = point
    return f"{formats.arm_name(arm)}, workload {workload} (OSL {osl}), concurrency {concurrency}" + (f", k = {k}" if k is not None else "")
