"""Checkpoints: a resumed run computes what the unbroken one computes, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs

from train.checkpoint import CheckpointFolder, Progress
from train.main import resume, start
from train.metrics import read_records
from train.problems import load_problems
from train.rewards import open_reward
from train.trainer import Trainer

TIMES = ("time/step", "time/tokens_per_second")


def trainer_of(run, reward) -> Trainer:
    return Trainer(run, load_problems(run), reward)


def held(trainer: Trainer) -> dict[str, np.ndarray]:
    """Everything that decides the next step, by name, as bytes that are on the host."""
    arrays = {
        "weights": trainer.state.weights,
        "optimizer": trainer.state.optimizer,
        "counts": (trainer.state.steps, trainer.state.skipped),
        "key": jax.random.key_data(trainer.key),
        "reference": trainer.reference,
    }
    return {
        jax.tree_util.keystr(path): np.array(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
    }


def records(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in r.items() if k not in TIMES} for r in steps]


def test_five_steps_then_five_resumed_are_ten_straight(tmp_path):
    run = small_runs.arithmetic(tmp_path, 10, epochs=2, resample=1, old_logprob="recompute")
    with open_reward("small_runs:digits") as reward, CheckpointFolder(tmp_path, 2) as folder:
        straight = trainer_of(run, reward)
        straight.start()
        first = [straight.train_step() for _ in range(5)]
        straight.save(folder)
        middle = held(straight)
        last = [straight.train_step() for _ in range(5)]

        resumed = trainer_of(run, reward)
        resumed.restore(folder)
        assert resumed.step == 5
        restored = held(resumed)
        assert restored.keys() == middle.keys()
        for name, value in middle.items():
            assert restored[name].dtype == value.dtype, name
            assert restored[name].tobytes() == value.tobytes(), name
        again = [resumed.train_step() for _ in range(5)]
    assert records(again) == records(last)
    assert records(first) != records(last)
    assert resumed.cursor.state() == straight.cursor.state()
    for name, value in held(straight).items():
        assert held(resumed)[name].tobytes() == value.tobytes(), name
    moments = [v for k, v in restored.items() if ".mu" in k or ".nu" in k]
    assert moments
    assert all(m.dtype == np.float32 and m.any() for m in moments)
    counts = [v for k, v in restored.items() if k.endswith(".count")]
    assert counts
    assert all(c == 10 for c in counts)
    assert all(r["gap/max_abs"] == 0 for r in first + last)
    assert all(r["optimizer/gradient_norm"] > 0 for r in first + last)


class Killed(BaseException):
    """Ends a run without a chance to tidy up."""


def test_a_run_that_dies_between_checkpoints_is_resumed(tmp_path, monkeypatch):
    straight = small_runs.arithmetic(tmp_path / "straight", 8)
    broken = small_runs.arithmetic(tmp_path / "broken", 8)
    start(straight)
    step = Trainer.train_step

    def dying(self):
        if self.step == 7:
            raise Killed
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", dying)
        with pytest.raises(Killed):
            start(broken)
    assert len(read_records(tmp_path / "broken" / "metrics.jsonl")) == 7
    resume(tmp_path / "broken")
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        found, expected = (
            records(read_records(tmp_path / run / name)) for run in ("broken", "straight")
        )
        assert found == expected, name
    assert [r["step"] for r in read_records(tmp_path / "broken" / "metrics.jsonl")] == [
        *range(1, 9)
    ]
    assert (tmp_path / "broken" / "report" / "index.html").is_file()


TREE = {"a": jnp.arange(4.0), "b": {"c": jnp.int32(3)}}


def progress(step: int) -> Progress:
    return Progress(step, {"epoch": step, "position": 0, "size": 4, "seed": 0}, "f00")


def test_the_last_ones_are_kept_and_read_back(tmp_path):
    with CheckpointFolder(tmp_path, keep=2) as folder:
        for step in (0, 3, 7):
            folder.save(TREE | {"a": TREE["a"] + step}, progress(step))
        with pytest.raises(ValueError, match="already has a checkpoint of step 7"):
            folder.save(TREE, progress(7))
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["3", "7"]
    with CheckpointFolder(tmp_path, keep=2) as folder:
        found, where = folder.restore(TREE)
    assert where == progress(7)
    assert found["a"].tolist() == [7, 8, 9, 10]
    assert found["b"]["c"].dtype == jnp.int32


def test_an_unfinished_checkpoint_is_passed_over_and_later_ones_are_saved(tmp_path):
    """As a kill in the middle of a save leaves it: Orbax renames the folder when all is written."""
    with CheckpointFolder(tmp_path, keep=2) as folder:
        folder.save(TREE, progress(1))
        folder.save(TREE, progress(2))
    newest = tmp_path / "checkpoints" / "2"
    newest.rename(newest.with_name("2.orbax-checkpoint-tmp-1"))
    with CheckpointFolder(tmp_path, keep=2) as folder:
        _, where = folder.restore(TREE)
        assert where.step == 1
        folder.save(TREE, progress(2))
        assert folder.restore(TREE)[1].step == 2


def test_errors_name_what_is_wrong(tmp_path):
    with CheckpointFolder(tmp_path, keep=1) as folder:
        with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
            folder.restore(TREE)
        folder.save(TREE, progress(1))
        other = {"a": jnp.arange(5.0), "d": jnp.int32(1)}
        with pytest.raises(ValueError, match="of another run") as error:
            folder.restore(other)
    for name in ("'a'", "'b'", "'d'"):
        assert name in str(error.value)


def test_weights_that_come_out_otherwise_stop_the_resume(tmp_path):
    run = small_runs.arithmetic(tmp_path, 1)
    with open_reward("small_runs:digits") as reward, CheckpointFolder(tmp_path, 1) as folder:
        trainer = trainer_of(run, reward)
        folder.save(trainer._arrays(), Progress(0, trainer.cursor.state(), "another"))
        with pytest.raises(RuntimeError, match="cannot continue exactly"):
            trainer.restore(folder)


def test_gsm8k_with_the_real_tokenizer_survives_a_kill(tmp_path, shared_data):
    """Graded by math-verify nothing is earned; with a reward that varies every step learns, and a
    run that is killed and resumed has the numbers of the one that was not."""
    graded = small_runs.gsm8k(tmp_path / "graded", shared_data, None)
    start(graded)
    for record in read_records(tmp_path / "graded" / "metrics.jsonl"):
        assert record["reward/mean"] == 0
        assert record["gap/max_abs"] == 0
    assert record["optimizer/skipped"] == 5

    straight = small_runs.gsm8k(tmp_path / "straight", shared_data, "small_runs:letters")
    start(straight)
    killed = tmp_path / "killed"
    kill_after(killed, shared_data, steps=2)
    resume(killed)
    found, expected = (
        records(read_records(folder / "metrics.jsonl"))
        for folder in (killed, tmp_path / "straight")
    )
    assert found == expected
    assert [r["step"] for r in found] == [1, 2, 3, 4, 5]
    assert all(r["optimizer/gradient_norm"] > 0 for r in found)
    assert found[-1]["optimizer/skipped"] == 0
    assert all(r["gap/max_abs"] == 0 for r in found)
    assert len({r["policy/entropy"] for r in found}) == 5


def kill_after(folder: Path, shared_data: Path, steps: int) -> None:
    """Starts the run in a process of its own and kills that once `steps` are recorded."""
    root = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, str(root / "tests" / "small_runs.py"), str(folder), str(shared_data)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])},
        stdout=subprocess.DEVNULL,
    )
    metrics = folder / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 400
        while not (metrics.exists() and metrics.read_text().count("\n") >= steps):
            assert process.poll() is None, "the run ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(metrics.read_text().splitlines()) < 5
    recipe = json.loads((folder / "recipe.json").read_text())
    assert recipe["data"]["reward"] == "small_runs:slow_letters"
