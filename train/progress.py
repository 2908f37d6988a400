"""Progress of a run on the console: a bar on a terminal, a plain line every so often elsewhere."""

import time
import types
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Name on the console, metric, format.
FIGURES = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "supervised/loss", "{:.3f}"),
    ("accuracy", "evaluation/accuracy", "{:.3f}"),
    ("gap", "gap/max_abs", "{:.1e}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("tokens/s", "time/tokens_per_second", "{:,.0f}"),
)


def summary(record: Mapping[str, float]) -> str:
    """The record's main figures in one line; "gap 0" only where it is exactly 0."""
    parts = []
    for label, name, form in FIGURES:
        if name in record:
            value = float(record[name])
            parts.append(f"{label} {'0' if value == 0.0 else form.format(value)}")
    return "  ".join(parts)


class ProgressBar:
    """Shows how far a run is. A context manager.

    Args:
      total: steps in all.
      start: steps done before, when resuming.
      description: what is counted.
      console: where to show it; by default standard output.
      every: seconds between plain lines where there is no terminal. The first and the last step
        are always shown.
    """

    def __init__(
        self,
        total: int,
        *,
        start: int = 0,
        description: str = "GRPO",
        console: Console | None = None,
        every: float = 10.0,
    ) -> None:
        self._total = total
        self._description = description
        self._console = console or Console(soft_wrap=True)
        self._every = every
        self._last_line: float | None = None
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(description, total=total, completed=start, figures="")

    def update(self, step: int, record: Mapping[str, float]) -> None:
        """Show that `step` is done, with the figures of its record."""
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, figures=summary(record))
            return
        now = time.monotonic()
        due = self._last_line is None or now - self._last_line >= self._every
        if due or step == self._total:
            self._last_line = now
            self.print(f"{self._description} {step}/{self._total}  {summary(record)}")

    def print(self, line: str) -> None:
        """Print a line of its own, above the bar if there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._bar.stop()
