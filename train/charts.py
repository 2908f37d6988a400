"""The charts of a run: each a function that draws metrics on one set of axes."""

import dataclasses
import io
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, PercentFormatter

from train.plotting import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    PURPLE,
    SIZE,
    STYLE,
    End,
    Records,
    finish,
    fraction_axis,
    lines,
    note,
    prepare,
    series,
    trend,
)


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


def reward(ax: Axes, records: Records) -> tuple[str, list[End]]:
    _, values = series(records, "reward/mean")
    drawn = trend(ax, records, "reward/mean", "mean over a step's completions", "{:.2f}")
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
    shown = (("gap/max_abs", "max", ORANGE), ("gap/mean_abs", "mean", BLUE),
             ("gap/k3", "k3", PURPLE))  # fmt: skip
    steps, largest = series(records, "gap/max_abs")
    zero = int((largest == 0.0).sum())
    subtitle = "|learner - sampler| at equal weights, nats"
    if zero == len(steps):
        ax.plot(steps, largest, color=GREEN, linewidth=2.2)
        ax.set_ylim(-0.06, 1)
        ax.set_yticks([0])
        note(
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
    ends = lines(ax, positive, shown, form="{:.1e}")
    return f"{subtitle}; exactly 0 at {zero} of {len(steps)} steps", ends


def zero_variance(ax: Axes, records: Records) -> tuple[str, list[End]]:
    subtitle = "fraction of groups whose rewards are all equal"
    drawn = trend(ax, records, "reward/zero_variance", subtitle, "{:.0%}")
    fraction_axis(ax)
    return drawn


def entropy(ax: Axes, records: Records) -> tuple[str, list[End]]:
    drawn = trend(ax, records, "policy/entropy", "of the next token, nats", "{:.3g}")
    ax.set_ylim(bottom=0)
    return drawn


def kl(ax: Axes, records: Records) -> tuple[str, list[End]]:
    return trend(ax, records, "policy/kl", "from the reference, nats a token", "{:.2g}")


def clipping(ax: Axes, records: Records) -> tuple[str, list[End]]:
    shown = (
        ("policy/clip_high", "high", ORANGE),
        ("policy/clip_low", "low", BLUE),
        ("policy/clip_dual", "dual", PURPLE),
        ("policy/sampler_capped", "cap", GREEN),
    )
    values = np.concatenate([series(records, name)[1] for name, _, _ in shown])
    subtitle = "fraction of the loss's tokens"
    if np.all(values == 0.0):
        ax.set_yticks([])
        ax.set_xlim(0, max(record["step"] for record in records))
        note(ax, MUTED, "no token was clipped")
        return subtitle, []
    ends = lines(ax, records, shown, form="{:.2%}")
    fraction_axis(ax)
    return subtitle, ends


def ratio(ax: Axes, records: Records) -> tuple[str, list[End]]:
    shown = (("policy/ratio_max", "max", ORANGE), ("policy/ratio_min", "min", BLUE))
    ends = lines(ax, records, shown)
    return "extremes over the loss's tokens", ends


def gradient_norm(ax: Axes, records: Records) -> tuple[str, list[End]]:
    _, values = series(records, "optimizer/gradient_norm")
    positive = values[values > 0]
    if positive.size and positive.max() > 30 * positive.min():
        ax.set_yscale("log", nonpositive="mask")
    return trend(ax, records, "optimizer/gradient_norm", "before clipping", "{:.2g}")


def lengths(ax: Axes, records: Records) -> tuple[str, list[End]]:
    steps, low = series(records, "length/min")
    top_steps, high = series(records, "length/max")
    if len(steps) == len(top_steps):
        ax.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0)
    ends = lines(ax, records, [("length/mean", "mean", BLUE)], form="{:.1f}")
    ax.set_ylim(bottom=0)
    return "tokens; band: shortest to longest", ends


def truncation(ax: Axes, records: Records) -> tuple[str, list[End]]:
    subtitle = "fraction cut at the length limit"
    drawn = trend(ax, records, "length/truncated", subtitle, "{:.1%}", ORANGE)
    fraction_axis(ax)
    return drawn


def throughput(ax: Axes, records: Records) -> tuple[str, list[End]]:
    ends = lines(ax, records, [("time/tokens_per_second", "", BLUE)], form="{:,.0f}")
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
            prepare(ax)
            subtitle, ends = chart.draw(ax, records)
            finish(ax, chart.title, subtitle, ends)
        image = io.BytesIO()
        figure.savefig(image, format="png")
    return image.getvalue()
