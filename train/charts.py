"""The charts of a run: each a function that draws metrics on one set of axes.

Lines are labelled at their end instead of in a legend; colours are those of Okabe and Ito ("Color
universal design", 2008), which colour-blind readers tell apart. Numbers that are not finite leave
a hole in a line.
"""

import dataclasses
import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

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


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart of a report. It is drawn when a record has one of `names`.

    file: name of the PNG file, without suffix.
    title, caption: the caption says how to read it.
    draw: draws on the axes; returns a subtitle and the labels of the lines' ends.
    evaluations: whether it shows the evaluations' records instead of the steps'.
    """

    file: str
    title: str
    caption: str
    names: tuple[str, ...]
    draw: Callable[[Axes, Records], tuple[str, list[End]]]
    evaluations: bool = False

    def has_data(self, records: Records) -> bool:
        return any(name in record for record in records for name in self.names)


def _prepare(ax: Axes) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.margins(x=0.02)
    ax.set_xlabel("step")


def _finish(ax: Axes, title: str, subtitle: str) -> None:
    left, right = ax.get_xlim()
    if right - left < 1.0:  # a single step: ticks at whole numbers all the same
        ax.set_xlim((left + right) / 2 - 0.6, (left + right) / 2 + 0.6)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=11, pad=22)
    ax.annotate(subtitle, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points",
                color=MUTED, fontsize=8.5)  # fmt: skip


def _label_ends(ax: Axes, ends: list[End]) -> None:
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


def _note(ax: Axes, color: str, text: str) -> None:
    """A statement in the middle of axes that have nothing else to show."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=color,
            fontsize=13, fontweight="bold", linespacing=1.5)  # fmt: skip


def _lines(
    ax: Axes, records: Records, lines: Sequence[tuple[str, str, str]], form: str = "{:.3g}"
) -> list[End]:
    """Draw lines (metric, label, colour); returns labels with their last values."""
    ends = []
    for name, label, color in lines:
        steps, values = series(records, name)
        finite = np.flatnonzero(np.isfinite(values))
        if finite.size:
            marker = "o" if len(finite) == 1 else None
            ax.plot(steps, values, color=color, marker=marker, markersize=4)
            last = float(values[finite[-1]])
            ends.append((last, f"{label} {form.format(last)}".strip(), color))
    return ends


def _trend(
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


def reward(ax: Axes, records: Records) -> tuple[str, list[End]]:
    _, values = series(records, "reward/mean")
    drawn = _trend(ax, records, "reward/mean", "mean over a step's completions", "{:.2f}")
    if np.nanmin(values, initial=0.0) >= 0.0 and np.nanmax(values, initial=1.0) <= 1.0:
        ax.set_ylim(0, 1)
    return drawn


def accuracy(ax: Axes, records: Records) -> tuple[str, list[End]]:
    steps, values = series(records, "evaluation/accuracy")
    ax.plot(steps, values, color=GREEN, marker="o", markersize=6, clip_on=False, zorder=3)
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.margins(x=0.08)
    for index in {0, len(steps) - 1}:
        if np.isfinite(values[index]):
            below = values[index] > 0.85
            ax.annotate(f"{values[index]:.1%}", (steps[index], values[index]),
                        (0, -11 if below else 11), textcoords="offset points", ha="center",
                        va="center", color=GREEN, fontweight="bold")  # fmt: skip
    return "fraction of problems never trained on", []


def gap(ax: Axes, records: Records) -> tuple[str, list[End]]:
    lines = (("gap/max_abs", "max", ORANGE), ("gap/mean_abs", "mean", BLUE),
             ("gap/k3", "k3", PURPLE))  # fmt: skip
    steps, largest = series(records, "gap/max_abs")
    zero = int((largest == 0.0).sum())
    subtitle = "|learner - sampler| at equal weights, nats"
    if zero == len(steps):
        ax.plot(steps, largest, color=GREEN, linewidth=2.2)
        ax.set_ylim(-0.06, 1)
        ax.set_yticks([0])
        _note(
            ax,
            GREEN,
            f"exactly 0\nat {'each of ' if zero > 1 else ''}{zero} step{'s' if zero > 1 else ''}",
        )
        return subtitle, []
    ax.set_yscale("log")
    # A zero has no place on a logarithmic axis: it leaves a hole, and is counted in words.
    positive = [
        {name: np.nan if value == 0.0 else value for name, value in record.items()}
        | {"step": record["step"]}
        for record in records
    ]
    ends = _lines(ax, positive, lines, form="{:.1e}")
    return f"{subtitle}; exactly 0 at {zero} of {len(steps)} steps", ends


def zero_variance(ax: Axes, records: Records) -> tuple[str, list[End]]:
    subtitle = "fraction of groups whose rewards are all equal"
    drawn = _trend(ax, records, "reward/zero_variance", subtitle, "{:.0%}")
    _fraction_axis(ax)
    return drawn


def _fraction_axis(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylim(bottom=0)


def entropy(ax: Axes, records: Records) -> tuple[str, list[End]]:
    drawn = _trend(ax, records, "policy/entropy", "of the next token, nats", "{:.3g}")
    ax.set_ylim(bottom=0)
    return drawn


def kl(ax: Axes, records: Records) -> tuple[str, list[End]]:
    return _trend(ax, records, "policy/kl", "from the reference, nats a token", "{:.2g}")


def clipping(ax: Axes, records: Records) -> tuple[str, list[End]]:
    lines = (
        ("policy/clip_high", "high", ORANGE),
        ("policy/clip_low", "low", BLUE),
        ("policy/clip_dual", "dual", PURPLE),
        ("policy/sampler_capped", "cap", GREEN),
    )
    values = np.concatenate([series(records, name)[1] for name, _, _ in lines])
    subtitle = "fraction of the loss's tokens"
    if np.all(values == 0.0):
        ax.set_yticks([])
        ax.set_xlim(0, max(record["step"] for record in records))
        _note(ax, MUTED, "no token was clipped")
        return subtitle, []
    ends = _lines(ax, records, lines, form="{:.2%}")
    _fraction_axis(ax)
    return subtitle, ends


def ratio(ax: Axes, records: Records) -> tuple[str, list[End]]:
    lines = (("policy/ratio_max", "max", ORANGE), ("policy/ratio_min", "min", BLUE))
    ends = _lines(ax, records, lines)
    return "extremes over the loss's tokens", ends


def gradient_norm(ax: Axes, records: Records) -> tuple[str, list[End]]:
    _, values = series(records, "optimizer/gradient_norm")
    positive = values[values > 0]
    if positive.size and positive.max() > 30 * positive.min():
        ax.set_yscale("log", nonpositive="mask")
    return _trend(ax, records, "optimizer/gradient_norm", "before clipping", "{:.2g}")


def lengths(ax: Axes, records: Records) -> tuple[str, list[End]]:
    steps, low = series(records, "length/min")
    top_steps, high = series(records, "length/max")
    if len(steps) == len(top_steps):
        ax.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0)
    ends = _lines(ax, records, [("length/mean", "mean", BLUE)], form="{:.1f}")
    ax.set_ylim(bottom=0)
    return "tokens; band: shortest to longest", ends


def truncation(ax: Axes, records: Records) -> tuple[str, list[End]]:
    subtitle = "fraction cut at the length limit"
    drawn = _trend(ax, records, "length/truncated", subtitle, "{:.1%}", ORANGE)
    _fraction_axis(ax)
    return drawn


def throughput(ax: Axes, records: Records) -> tuple[str, list[End]]:
    ends = _lines(ax, records, [("time/tokens_per_second", "", BLUE)], form="{:,.0f}")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.set_ylim(bottom=0)
    return "completion tokens a second, sampling and learning", ends


CHARTS = (
    Chart("reward", "Reward", "The task's reward, before any penalty.", ("reward/mean",), reward),
    Chart(
        "accuracy",
        "Held-out accuracy",
        "Measured before training, after it, and in between where the recipe asks for it.",
        ("evaluation/accuracy",),
        accuracy,
        evaluations=True,
    ),
    Chart(
        "gap",
        "Log-prob gap",
        "Difference between the log-probs that the sampler drew from and those that the learner "
        "computes with the same weights. It is 0 when both compute the same thing.",
        ("gap/max_abs",),
        gap,
    ),
    Chart(
        "entropy",
        "Entropy",
        "Exact, from the whole distribution of each token.",
        ("policy/entropy",),
        entropy,
    ),
    Chart(
        "kl",
        "KL divergence",
        "How far the policy has moved from the reference model.",
        ("policy/kl",),
        kl,
    ),
    Chart(
        "clipping",
        "Clipped tokens",
        "Tokens that give no gradient because the policy has moved far enough in their direction.",
        ("policy/clip_low", "policy/clip_high"),
        clipping,
    ),
    Chart(
        "ratio",
        "Importance ratio",
        "Probability under the learner over that at the start of the update.",
        ("policy/ratio_max",),
        ratio,
    ),
    Chart(
        "gradient_norm",
        "Gradient norm",
        "Global norm of a step's gradient.",
        ("optimizer/gradient_norm",),
        gradient_norm,
    ),
    Chart(
        "zero_variance",
        "Groups without signal",
        "Prompts whose completions all earn the same teach nothing.",
        ("reward/zero_variance",),
        zero_variance,
    ),
    Chart("length", "Completion length", "Stop token included.", ("length/mean",), lengths),
    Chart(
        "truncation",
        "Truncated completions",
        "Completions that did not stop by themselves.",
        ("length/truncated",),
        truncation,
    ),
    Chart(
        "throughput",
        "Throughput",
        "The first step includes compiling.",
        ("time/tokens_per_second",),
        throughput,
    ),
)
SUMMARY = ("reward", "accuracy", "gap")


def png(charts: Sequence[Chart], steps: Records, evaluations: Records) -> bytes:
    """The charts side by side as one PNG image; those without data are left out."""
    chosen = [(c, evaluations if c.evaluations else steps) for c in charts]
    chosen = [(chart, records) for chart, records in chosen if chart.has_data(records)]
    with matplotlib.rc_context(STYLE):
        width = SIZE[0] if len(chosen) == 1 else 0.82 * SIZE[0] * len(chosen)
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1, wspace=0.06)
        figure = Figure(figsize=(width, SIZE[1]), layout=layout)
        for ax, (chart, records) in zip(
            figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True
        ):
            _prepare(ax)
            subtitle, ends = chart.draw(ax, records)
            _finish(ax, chart.title, subtitle)
            _label_ends(ax, ends)
        image = io.BytesIO()
        figure.savefig(image, format="png")
    return image.getvalue()
