"""One HTML page that shows how a run went.

`write_report` reads what metrics.py wrote, and the recipe, from a run's folder, and writes
`report/index.html` there: one page that needs no other file. Its charts lie beside it as PNG files,
with `summary.png` (reward, held-out accuracy and log-prob gap in one row).
"""

import base64
import json
import math
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from train import charts
from train.metrics import (
    EVALUATION_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    VERSIONS_FILE,
    read_records,
)
from train.plotting import Records, series

REPORT_FOLDER = "report"
PAGE = "index.html"
SUMMARY_PICTURE = "summary.png"
TEMPLATE = Path(__file__).with_name("report_page.html")

Table = dict[str, str]


def write_report(run: Path) -> Path:
    """Write the report of a run, finished or not, in place of an older one.

    Args:
      run: the run's folder.

    Returns:
      The page.

    Raises:
      FileNotFoundError: the folder holds no metrics.
      ValueError: the metrics are empty, or a file is damaged; the message has its path.
    """
    path = run / METRICS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: a report needs the folder of a training run, which holds it"
        )
    steps = read_records(path)
    if not steps:
        raise ValueError(f"{path} is empty: the run has not finished its first step")
    evaluation_path = run / EVALUATION_FILE
    evaluations = read_records(evaluation_path) if evaluation_path.is_file() else []

    folder = run / REPORT_FOLDER
    folder.mkdir(exist_ok=True)
    images = []
    for chart in charts.CHARTS:
        picture = folder / f"{chart.file}.png"
        picture.unlink(missing_ok=True)
        if chart.has_data(evaluations if chart.evaluations else steps):
            data = charts.png([chart], steps, evaluations)
            picture.write_bytes(data)
            images.append((chart, base64.b64encode(data).decode("ascii")))
    summary = [chart for chart in charts.CHARTS if chart.file in charts.SUMMARY]
    (folder / SUMMARY_PICTURE).write_bytes(charts.png(summary, steps, evaluations))

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=run.resolve().name,
        path=str(run.resolve()),
        headline=headline(steps, evaluations),
        warnings=warnings(steps),
        charts=images,
        tables=[
            ("Recipe", _sections(run / RECIPE_FILE, "general")),
            ("Versions", _sections(run / VERSIONS_FILE, "software")),
        ],
    )
    (folder / PAGE).write_text(page, encoding="utf-8")
    return folder / PAGE


def headline(steps: Records, evaluations: Records) -> list[tuple[str, str, str]]:
    """The main results as (label, value, detail)."""
    found = [("Steps", f"{steps[-1]['step']:,.0f}", _duration(steps))]
    _, rewards = series(steps, "reward/mean")
    rewards = rewards[np.isfinite(rewards)]
    if rewards.size:
        n = min(10, len(rewards))
        change = f"{rewards[:n].mean():.2f} → {rewards[-n:].mean():.2f}"
        found.append(("Reward", change, f"mean of the first and last {n} steps"))
    at, accuracy = series(evaluations, "evaluation/accuracy")
    if len(accuracy) > 1:
        change = f"{accuracy[0]:.1%} → {accuracy[-1]:.1%}"
        found.append(("Held-out accuracy", change, f"before, and after {at[-1]:.0f} steps"))
    elif len(accuracy):
        found.append(("Held-out accuracy", f"{accuracy[0]:.1%}", f"after {at[0]:.0f} steps"))
    _, gap = series(steps, "gap/max_abs")
    if gap.size:
        detail = f"largest over {len(gap)} steps, in nats"
        if np.all(gap == 0.0):
            found.append(("Log-prob gap", "exactly 0", detail))
        elif np.isfinite(gap).any():
            found.append(("Log-prob gap", f"{np.nanmax(gap):.1e}", detail))
    _, speed = series(steps, "time/tokens_per_second")
    speed = speed[np.isfinite(speed)]
    if speed.size:
        found.append(("Throughput", f"{np.median(speed):,.0f} tokens/s", "median of the steps"))
    return found


def _duration(steps: Records) -> str:
    _, times = series(steps, "time/step")
    if not times.size or not np.isfinite(times).all():
        return ""
    minutes, seconds = divmod(round(times.sum()), 60)
    return f"in {minutes} min {seconds} s" if minutes else f"in {seconds} s"


def warnings(steps: Records) -> list[str]:
    """What a reader should know before reading the curves."""
    found = []
    names = {n: sum(not math.isfinite(r.get(n, 0.0)) for r in steps) for r in steps for n in r}
    bad = [f"{name} ({count})" for name, count in sorted(names.items()) if count]
    if bad:
        found.append(f"Not finite, by number of steps: {', '.join(bad)}.")
    skipped = steps[-1].get("optimizer/skipped", 0.0)
    if skipped:
        found.append(f"Optimiser steps skipped for want of a usable gradient: {skipped:.0f}.")
    return found


def _sections(path: Path, own: str) -> dict[str, Table]:
    """A JSON object as tables by its top-level keys; plain values are in the one named `own`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(content).__name__}")
    plain = {key: value for key, value in content.items() if not isinstance(value, dict)}
    nested = {key: value for key, value in content.items() if isinstance(value, dict) and value}
    sections = {own: plain, **nested} if plain else nested
    return {key: _flat(value) for key, value in sections.items()}


def _flat(value: dict[str, Any], prefix: str = "") -> Table:
    """Nested objects as one table with dotted keys."""
    table: Table = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            table |= _flat(item, f"{prefix}{key}.")
        else:
            text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
            table[f"{prefix}{key}"] = text
    return table
