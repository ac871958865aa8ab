"""What the report's pictures share: style, colours, titles, and names beside lines.

Colours are such that colour-blind readers can tell them apart, and series are labelled where they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raysd.report import formats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, the darker half: readable on white and in grey print.
ARM_COLOURS = {"none": "#5B5B5B", "bf16": "#0072B2", "fp8": "#D55E00"}
POSITION_COLOURS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D00", "#5B5B5B", "#7B3294")
INK, QUIET, GRID, LOSS = "#1f2933", "#66727f", "#e4e8ec", "#fbeee6"
LINE_STYLES = ("-", "--", "-.", ":")
RATIOS = (1e-3, 1e3)
"""The least and the greatest ratio that is drawn: beyond them something is wrong, which nobody can read off an axis; and an axis to 1e200 is an error of Matplotlib's."""
FARTHEST = 1e100
"""Likewise of rates and latencies, which have no usual size; its reciprocal is the least on a logarithmic axis."""


@contextlib.contextmanager
def figure_at(width_in: float, height_in: float, path: Path) -> Iterator[Figure]:
    """A figure that is written to `path` on a normal exit."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": "#c3cad1",
        "axes.linewidth": 0.8,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "axes.axisbelow": True,
    }
    with mpl.rc_context(style):
        figure = Figure((width_in, height_in), dpi=200, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        yield figure
        canvas.print_png(path, metadata={"Software": None})  # no version inside: the same data gives the same bytes


def title(figure: Figure, text: str, subtitle: str) -> None:
    """Title and subtitle at the top left, as far from the edge in a picture of any height."""
    height_in = figure.get_size_inches()[1]
    figure.text(0.015, 1 - 0.22 / height_in, text, fontsize=13, fontweight="bold", va="center")
    figure.text(0.015, 1 - 0.50 / height_in, subtitle, fontsize=9.5, color=QUIET, va="center")


def say(axes: Axes, text: str) -> None:
    """Words where there is nothing to draw."""
    axes.set_axis_off()
    axes.text(0, 0.5, text, fontsize=11, color=QUIET, transform=axes.transAxes)


def fits(ratio: float) -> bool:
    """Whether a ratio can be drawn; for one that cannot, the picture says `left_out`."""
    return RATIOS[0] <= ratio <= RATIOS[1]


def cut(ratio: float) -> float:
    """The end of a bar, at most as far as ratios are drawn."""
    return min(max(ratio, RATIOS[0]), RATIOS[1])


def left_out(figure: Figure, points: int, y: float) -> None:
    """Says at the right, y of the way up, how many points a picture lacks, if it lacks any."""
    if points:
        figure.text(0.98, y, f"not drawn, since too far off, but in the table: {formats.plural(points, 'point')}", ha="right", va="center", fontsize=8.5, color=QUIET)


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]], size: float = 10) -> None:
    """Names of series beside their last points, moved apart where they would overlap, and readable across a line. ends: (y, x, name, colour)."""
    from matplotlib.patheffects import withStroke

    axes.figure.draw_without_rendering()  # fixes the scales, so that data can be turned into pixels
    line_px = size * 1.35 * axes.figure.dpi / 72
    above = -math.inf
    for y, x, name, colour in sorted(ends):
        wanted = axes.transData.transform((x, y))[1]
        above = max(wanted, above + line_px)
        axes.annotate(
            name,
            (x, y),
            xytext=(size * 1.1, (above - wanted) * 72 / axes.figure.dpi),
            textcoords="offset points",
            va="center",
            ha="left",
            fontsize=size,
            fontweight="bold",
            color=colour,
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
