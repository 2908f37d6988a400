"""How a chart of a run looks: style, axes, lines and their labels.

Lines are labelled at their end instead of in a legend; colours are those of Okabe and Ito ("Color
universal design", 2008), which colour-blind readers tell apart. Numbers that are not finite leave
a hole in a line.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

Records = Sequence[dict[str, float]]
# Label at the end of a line: height in data, text, colour.
End = tuple[float, str, str]

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#AA4499"
INK, MUTED, RULE = "#1F2933", "#6B7785", "#DDE2E8"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": MUTED,
    "axes.formatter.useoffset": False,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.major.pad": 6,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "white",
    "savefig.dpi": 180,
}
SIZE = (5.6, 3.1)  # inches


def series(records: Records, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have `name`; NaN where a value is not finite."""
    found = [(record["step"], record[name]) for record in records if name in record]
    steps, values = np.array(found, np.float64).reshape(-1, 2).T
    return steps, np.where(np.isfinite(values), values, np.nan)


def smooth(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Centred running mean over about a twelfth of the values (at most 25), and its width.

    NaN values are left out; near the ends the window gets narrower.
    """
    half = min(len(values) // 24, 12)
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    finite = [window[np.isfinite(window)] for window in windows]
    return np.array([w.mean() if w.size else np.nan for w in finite]), 2 * half + 1


def prepare(ax: Axes) -> None:
    """What every chart has, before anything is drawn."""
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.margins(x=0.02)
    ax.set_xlabel("step")


def finish(ax: Axes, title: str, subtitle: str, ends: list[End]) -> None:
    """Title and labels, after everything is drawn."""
    left, right = ax.get_xlim()
    if right - left < 1.0:  # a single step: ticks at whole numbers all the same
        ax.set_xlim((left + right) / 2 - 0.6, (left + right) / 2 + 0.6)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=11, pad=22)
    ax.annotate(subtitle, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points",
                color=MUTED, fontsize=8.5)  # fmt: skip
    label_ends(ax, ends)


def label_ends(ax: Axes, ends: list[End]) -> None:
    """Write labels right of the axes, moved apart where they would touch."""
    low, high = ax.get_ylim()  # settles the limits, which the transform then has
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = [float(to_axes.transform((1.0, np.clip(y, low, high)))[1]) for y, _, _ in ends]
    gap, top = 0.085, -np.inf
    order = np.argsort(heights, kind="stable")
    for index in order:
        top = heights[index] = max(heights[index], top + gap)
    for height, (_, text, color) in zip(heights, ends, strict=True):
        ax.text(1.02, height - max(top - 1.0, 0.0), text, color=color, transform=ax.transAxes,
                va="center", fontsize=9)  # fmt: skip


def note(ax: Axes, color: str, text: str) -> None:
    """A statement in the middle of axes that have nothing else to show."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=color,
            fontsize=13, fontweight="bold", linespacing=1.5)  # fmt: skip


def lines(
    ax: Axes, records: Records, shown: Sequence[tuple[str, str, str]], form: str = "{:.3g}"
) -> list[End]:
    """Draw lines (metric, label, colour); returns labels with their last values."""
    ends = []
    for name, label, color in shown:
        steps, values = series(records, name)
        finite = np.flatnonzero(np.isfinite(values))
        if finite.size:
            marker = "o" if len(finite) == 1 else None
            ax.plot(steps, values, color=color, marker=marker, markersize=4)
            last = float(values[finite[-1]])
            ends.append((last, f"{label} {form.format(last)}".strip(), color))
    return ends


def trend(
    ax: Axes, records: Records, name: str, subtitle: str, form: str, color: str = BLUE
) -> tuple[str, list[End]]:
    """Draw a noisy metric with its running mean; the label is that mean's last value."""
    steps, values = series(records, name)
    smoothed, width = smooth(values)
    finite = smoothed[np.isfinite(smoothed)]
    if width > 1:
        subtitle += f"; bold: mean of {width} steps"
        ax.plot(steps, values, color=color, alpha=0.28, linewidth=1.0)
    marker = "o" if len(finite) == 1 else None
    ax.plot(steps, smoothed, color=color, linewidth=2.2, marker=marker)
    return subtitle, [(float(y), form.format(y), color) for y in finite[-1:]]


def fraction_axis(ax: Axes) -> None:
    """Percents from 0 up."""
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylim(bottom=0)
