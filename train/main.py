"""`python -m train`: run a recipe, resume a run, write a run's report.

The run's folder holds recipe.json (everything that decides the run), metrics.jsonl,
evaluation.jsonl, tensorboard/, checkpoints/ and report/.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import AvoidSubcommands, Positional, SuppressFixed, arg, subcommand

from train import recipes
from train.checkpoint import CheckpointFolder
from train.config import Run, from_json, to_json
from train.metrics import (
    EVALUATION_FILE,
    METRICS_FILE,
    RECIPE_FILE,
    MetricsWriter,
    read_records,
)
from train.problems import load_problems
from train.progress import ProgressBar
from train.report import write_report
from train.rewards import open_reward
from train.trainer import Trainer


@dataclass(frozen=True)
class Resume:
    """Continue a run from its last checkpoint, exactly as if it had not been stopped."""

    folder: Positional[Path]
    """The run's folder."""


@dataclass(frozen=True)
class Report:
    """Write one HTML page with the curves of a run, and the curves as PNGs."""

    folder: Positional[Path]
    """The run's folder."""


def _recipe(recipe: Callable[[], Run]) -> Any:
    """The recipe as a subcommand: its values are the defaults of the options."""
    run = recipe()
    return Annotated[Run, subcommand(run.name, default=run, description=recipe.__doc__)]


# A type that is made at run time: to the type checker the command is any of the three classes.
_COMMAND: Any = Annotated[
    _recipe(recipes.tiny)
    | _recipe(recipes.qwen3_4b)
    | _recipe(recipes.qwen3_30b_a3b)
    | Annotated[Resume, subcommand("resume")]
    | Annotated[Report, subcommand("report")],
    arg(name=""),
]
CommandLine = dataclasses.make_dataclass(
    "CommandLine", [("command", _COMMAND)], frozen=True, namespace={"__doc__": "What to do."}
)


def main(arguments: list[str] | None = None) -> None:
    """The command line; `arguments` default to those of the process."""
    try:
        command = tyro.cli(
            CommandLine,
            prog="python -m train",
            description=__doc__,
            args=arguments,
            config=(AvoidSubcommands, SuppressFixed),
        ).command
        if isinstance(command, Run):
            start(command)
        elif isinstance(command, Resume):
            resume(command.folder)
        else:
            print(f"report: {write_report(command.folder)}")
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        sys.exit(f"error: {error}")


def start(run: Run) -> Path:
    """Trains from the beginning and returns the run's folder."""
    run.check_inputs()
    folder = run.folder or Path("runs") / f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    problems = load_problems(run)
    folder.mkdir(parents=True, exist_ok=True)
    with MetricsWriter(folder) as writer, open_reward(problems.reward) as reward:
        recipe = json.dumps(to_json(dataclasses.replace(run, folder=folder)), indent=2) + "\n"
        (folder / RECIPE_FILE).write_text(recipe, encoding="utf-8")
        _train(Trainer(run, problems, reward), folder, writer, resumed=False)
    return folder


def resume(folder: Path) -> None:
    """Continues the run in `folder` from its last checkpoint."""
    path = folder / RECIPE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not the folder of a run: there is no {RECIPE_FILE}")
    run = from_json(Run, json.loads(path.read_text(encoding="utf-8")))
    run.check_inputs()
    problems = load_problems(run)
    with open_reward(problems.reward) as reward:
        trainer = Trainer(run, problems, reward)
        with CheckpointFolder(folder, run.checkpoints.keep) as checkpoints:
            trainer.restore(checkpoints)
        with MetricsWriter(folder, resume_step=trainer.step) as writer:
            _train(trainer, folder, writer, resumed=True)


def _train(trainer: Trainer, folder: Path, writer: MetricsWriter, *, resumed: bool) -> None:
    """From the trainer's step to the last one, with its records, checkpoints and report."""
    run = trainer.run
    print(f"run folder: {folder}")
    with CheckpointFolder(folder, run.checkpoints.keep) as checkpoints:
        if not resumed:
            trainer.start()
            trainer.save(checkpoints)

        def evaluate() -> None:
            if trainer.problems.heldout and writer.last_evaluation < trainer.step:
                record = trainer.evaluate(trainer.state.weights, trainer.step)
                writer.write_evaluation(trainer.step, record)

        if trainer.step == 0:
            evaluate()
        with ProgressBar(run.grpo.steps, start=trainer.step) as bar:
            while trainer.step < run.grpo.steps:
                record = trainer.train_step()
                writer.write(trainer.step, record)
                bar.update(trainer.step, record)
                every = run.evaluation.every
                if trainer.step == run.grpo.steps or (every and trainer.step % every == 0):
                    evaluate()
                if trainer.step == run.grpo.steps or trainer.step % run.checkpoints.every == 0:
                    trainer.save(checkpoints)
    print_summary(folder)


def print_summary(folder: Path) -> None:
    """The outcome of a finished run, and where it is."""
    steps = read_records(folder / METRICS_FILE)
    evaluations = read_records(folder / EVALUATION_FILE)

    def mean_reward(records: list[dict[str, float]]) -> float:
        return sum(r["reward/mean"] for r in records) / len(records)

    print(
        f"mean reward: {mean_reward(steps[:10]):.3f} over the first ten steps, "
        f"{mean_reward(steps[-10:]):.3f} over the last ten"
    )
    if evaluations:
        before, after = evaluations[0], evaluations[-1]
        print(
            f"held-out accuracy: {before['evaluation/accuracy']:.3f} before GRPO, "
            f"{after['evaluation/accuracy']:.3f} after"
        )
    gap = max(r["gap/max_abs"] for r in steps)
    print(f"largest log-prob gap between sampler and learner: {gap:g}{' (exactly 0)' * (gap == 0)}")
    print(f"run folder: {folder}")
    print(f"report: {write_report(folder)}")
