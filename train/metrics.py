"""What a run records: names, the files that hold them, and their writer.

A record is a flat `dict[str, float]` plus "step". Training steps count from 1; an evaluation at
step 0 is one before training. Means are over the loss's tokens; log-probs are in nats, times in
seconds, lengths in tokens.

    name                         meaning
    reward/mean std min max      reward of the step's completions as the grader gave it
    reward/shaped_mean           the same with the overlong penalty, as it is learned from
    reward/zero_variance         fraction of groups whose shaped rewards are all equal
    grading/graded timeout ...   responses of the step whose grading ended so (grading.OUTCOMES);
                                 with a reward that is graded in processes of its own
    length/mean min max          completion length
    length/truncated             fraction of completions cut at the limit
    gap/mean_abs max_abs         |log-prob of the learner - of the sampler| at equal weights
    gap/k3                       k3 estimate of KL(sampler || learner)
    policy/loss                  the loss
    policy/entropy               entropy of the next-token distribution
    policy/kl                    estimate of KL(policy || reference); with a reference model
    policy/ratio_min ratio_max   extremes of pi / pi_old
    policy/clip_low clip_high    fraction of tokens clipped at either end
    policy/clip_dual             fraction limited by dual_clip; when it is set
    policy/sampler_capped        fraction whose pi_old / pi_sampler was capped; when it is set
    optimizer/gradient_norm      global norm before clipping
    optimizer/learning_rate
    optimizer/skipped            optimiser steps skipped so far, for want of a gradient
    sampling/resampled           groups drawn again for zero variance in this step
    time/step                    duration of the step
    time/tokens_per_second       completion tokens of the step / time/step
    evaluation/accuracy          fraction of held-out problems solved
    evaluation/reward            mean reward on held-out problems

`metrics.jsonl` has one line for each step and `evaluation.jsonl` one for each evaluation; both also
go to TensorBoard (`tensorboard/`). A number that is not finite is written as one of the strings
"NaN", "Infinity", "-Infinity", which keeps every line valid JSON; `read_records` turns it back.
"""

import importlib.metadata
import json
import math
import os
import platform
import types
from collections.abc import Mapping
from pathlib import Path
from typing import SupportsFloat

from tensorboardX import SummaryWriter

METRICS_FILE = "metrics.jsonl"
EVALUATION_FILE = "evaluation.jsonl"
RECIPE_FILE = "recipe.json"
VERSIONS_FILE = "versions.json"
TENSORBOARD_FOLDER = "tensorboard"

Record = Mapping[str, SupportsFloat]


def _to_json(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def read_records(path: Path) -> list[dict[str, float]]:
    """The records of a file, in order of step; a last line that was cut short is left out.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line other than the last is no record, named by its number.
    """
    records: list[dict[str, float]] = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = {name: float(value) for name, value in json.loads(line).items()}
            record["step"] = int(record["step"])
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{path}, line {number}: not a record of metrics ({error!r})"
            ) from error
        records.append(record)
    return records


class RecordFile:
    """A file of records to which lines are appended, each in one write.

    Args:
      path: the file; its folder exists.
      resume_step: the step that the run continues from: records of later steps, which will be
        made again, are dropped. None: a new run, for which the file must not exist.

    Raises:
      FileExistsError: a new run would mix its records with those of an older one.
    """

    def __init__(self, path: Path, resume_step: int | None) -> None:
        kept: list[dict[str, float]] = []
        if path.exists():
            if resume_step is None:
                raise FileExistsError(
                    f"{path} already exists: resume that run, or choose another run folder"
                )
            kept = [record for record in read_records(path) if record["step"] <= resume_step]
        self.path = path
        self.last_step = int(kept[-1]["step"]) if kept else -1
        # A new file replaces the old one in one step: a kill in between loses neither.
        unfinished = path.with_name(path.name + ".new")
        self._descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for record in kept:
            self._append(record)
        os.fsync(self._descriptor)
        unfinished.replace(path)

    def _append(self, record: Mapping[str, float]) -> None:
        line = json.dumps({k: _to_json(v) for k, v in record.items()}, allow_nan=False)
        data = f"{line}\n".encode()
        written = os.write(self._descriptor, data)
        if written != len(data):
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes could be written")

    def append(self, step: int, record: Record) -> dict[str, float]:
        """Write one record and return it as plain floats. Steps must increase."""
        if step <= self.last_step:
            raise ValueError(
                f"step={step}: {self.path} already has step {self.last_step}; steps must increase"
            )
        plain = {name: float(value) for name, value in record.items() if name != "step"}
        self._append({"step": step, **plain})
        self.last_step = step
        return plain

    def close(self) -> None:
        os.close(self._descriptor)


def versions() -> dict[str, str]:
    """Versions of what computes, by name."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("jaxfp4", "jax", "jaxlib", "flax", "optax", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


class MetricsWriter:
    """Writes a run's records to its folder. A context manager.

    Args:
      run: the run's folder; made if needed.
      resume_step: see `RecordFile`.

    Raises:
      FileExistsError: the folder holds another run's records and resume_step is None.
    """

    def __init__(self, run: Path, resume_step: int | None = None) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self._steps = RecordFile(run / METRICS_FILE, resume_step)
        self._evaluations = RecordFile(run / EVALUATION_FILE, resume_step)
        text = json.dumps(versions(), indent=2) + "\n"
        (run / VERSIONS_FILE).write_text(text, encoding="utf-8")
        self._tensorboard = SummaryWriter(
            str(run / TENSORBOARD_FOLDER),
            purge_step=None if resume_step is None else resume_step + 1,
        )

    def write(self, step: int, record: Record) -> None:
        """Record a training step; steps increase."""
        self._write(self._steps, step, record)

    def write_evaluation(self, step: int, record: Record) -> None:
        """Record an evaluation after `step` training steps; steps increase."""
        self._write(self._evaluations, step, record)

    @property
    def last_evaluation(self) -> int:
        """Step of the last evaluation recorded, -1 when there is none."""
        return self._evaluations.last_step

    def _write(self, file: RecordFile, step: int, record: Record) -> None:
        for name, value in file.append(step, record).items():
            self._tensorboard.add_scalar(name, value, step)
        self._tensorboard.flush()

    def close(self) -> None:
        self._steps.close()
        self._evaluations.close()
        self._tensorboard.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()
