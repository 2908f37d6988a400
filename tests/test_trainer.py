"""The training loop: dynamic sampling draws again, up to its cap, and learns what differs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_runs

from train import supervised
from train.config import Run
from train.learner import Batch
from train.problems import load_problems
from train.progress import ProgressBar
from train.trainer import Trainer

ROWS = 16  # four prompts, four completions each


class Rewards:
    """Grades by a table: call i of the reward gives row i, or the last one."""

    def __init__(self, *tables: np.ndarray) -> None:
        self.tables = tables
        self.calls = 0

    @property
    def counts(self) -> dict[str, int]:
        return {"graded": 15 * self.calls, "timeout": self.calls}

    def __call__(self, examples, responses) -> list[float]:
        assert len(examples) == len(responses) == ROWS
        self.calls += 1
        return self.tables[min(self.calls, len(self.tables)) - 1].tolist()


EQUAL = np.ones(ROWS)
TWO_DIFFER = np.array([1.0] * 4 + [0, 1, 0, 1] + [0.0] * 4 + [1, 1, 0, 0])
ALL_DIFFER = np.tile([0.0, 1.0], 8)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory) -> Trainer:
    run = small_runs.arithmetic(tmp_path_factory.mktemp("run"), 10)
    return Trainer(run, load_problems(run), Rewards(EQUAL))


def batch_of_a_step(trainer: Trainer, monkeypatch, rewards: Rewards, **changes: int):
    """The step's record and the batch that the learner was given."""
    seen: list[Batch] = []
    run: Run = trainer.run
    grpo = replace(run.grpo, **changes)
    monkeypatch.setattr(trainer, "run", replace(run, grpo=grpo))
    monkeypatch.setattr(trainer, "reward", rewards)

    def update(state, batch):
        seen.append(batch)
        return state, {}, batch.rollout.logprob

    class Learner:
        pass

    learner = Learner()
    learner.update = update
    monkeypatch.setattr(trainer, "learner", learner)
    record = trainer.train_step()
    return record, seen[0]


@pytest.mark.parametrize(
    ("tables", "resample", "calls", "resampled", "learned"),
    [
        # Without dynamic sampling every group counts, equal or not.
        ((EQUAL,), 0, 1, 0, 16),
        ((ALL_DIFFER,), 3, 1, 0, 16),
        ((TWO_DIFFER, TWO_DIFFER), 3, 2, 2, 16),
        # The cap: what is still missing is filled up with equal groups, which are not learned.
        ((EQUAL, TWO_DIFFER, EQUAL), 2, 3, 4 + 2, 8),
        ((EQUAL,), 1, 2, 4, 0),
    ],
)
def test_dynamic_sampling(trainer, monkeypatch, tables, resample, calls, resampled, learned):
    rewards = Rewards(*tables)
    record, batch = batch_of_a_step(trainer, monkeypatch, rewards, resample=resample)
    assert rewards.calls == calls
    assert record["sampling/resampled"] == resampled
    assert batch.rollout.tokens.shape[0] == ROWS
    assert int(batch.learned.sum()) == learned
    groups = np.asarray(batch.rollout.rewards).reshape(-1, 4)
    differ = groups.min(axis=1) < groups.max(axis=1)
    if resample:
        np.testing.assert_array_equal(np.asarray(batch.learned), np.repeat(differ, 4))
    advantages = np.asarray(batch.advantages).reshape(-1, 4)
    assert (advantages[~differ] == 0).all()
    assert np.isfinite(advantages).all()
    assert jax.tree.all(jax.tree.map(lambda leaf: leaf.shape[0] == ROWS, batch.rollout))


def test_rewards_are_recorded_as_graded_and_as_learned_from(trainer, monkeypatch):
    rewards = Rewards(ALL_DIFFER)
    # Every token is over the limit's buffer of three: a length costs a third each.
    record, batch = batch_of_a_step(trainer, monkeypatch, rewards, overlong_buffer=3)
    lengths = np.asarray(batch.rollout.mask).sum(axis=1)
    np.testing.assert_allclose(batch.rollout.rewards, ALL_DIFFER - lengths / 3, rtol=1e-6)
    assert record["reward/mean"] == 0.5
    assert record["reward/min"] == 0.0
    np.testing.assert_allclose(record["reward/shaped_mean"], 0.5 - lengths.mean() / 3, rtol=1e-6)


def test_outcomes_of_grading_are_recorded_by_step(trainer, monkeypatch):
    rewards = Rewards(ALL_DIFFER)
    for _ in range(2):
        record, _ = batch_of_a_step(trainer, monkeypatch, rewards)
        assert (record["grading/graded"], record["grading/timeout"]) == (15, 1)


def test_the_supervised_phase_shows_every_step(trainer, monkeypatch):
    shown = []

    class Bar(ProgressBar):
        def update(self, step, record):
            shown.append((step, *record))
            super().update(step, record)

    monkeypatch.setattr(supervised, "ProgressBar", Bar)
    phase = replace(trainer.run.supervised, max_steps=3, check_every=2)
    run = replace(trainer.run, supervised=phase)
    state = trainer.learner.init(jax.tree.map(jnp.copy, trainer.state.weights.params))
    supervised.teach_format(run, trainer.problems, trainer.learner, state, lambda *_: 0.1)
    assert [step for step, *_ in shown] == [1, 2, 3]
    assert shown[0][1:] == ("supervised/loss",)
    assert shown[-1][1:] == ("supervised/loss", "evaluation/accuracy")
