"""A short supervised phase: teaches the format of an answer before reinforcement learning.

Next-token likelihood of the worked answers of problems that neither reinforcement learning nor
the evaluation sees. It stops as soon as sampled answers to held-out problems are right often
enough to be rewarded now and then, far from always.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from train.config import Run
from train.data import PromptCursor
from train.learner import Learner, TrainState
from train.problems import Problem, Problems
from train.progress import ProgressBar
from train.rollout import Rollout


def worked_answers(problems: Problems, chosen: Sequence[Problem], max_new_tokens: int) -> Rollout:
    """Prompts with their right answers and the stop token, as if they had been sampled.

    Raises:
      ValueError: an answer is longer than `max_new_tokens`.
    """
    tokenizer = problems.tokenizer
    prompts, start = problems.prompts(chosen)
    answers = np.full((len(chosen), max_new_tokens), tokenizer.pad_id, np.int32)
    lengths = np.zeros(len(chosen), np.int32)
    for row, problem in enumerate(chosen):
        ids = [*tokenizer.encode(problem.example.answer), tokenizer.stop_ids[0]]
        if len(ids) > max_new_tokens:
            raise ValueError(
                f"sampling.max-new-tokens={max_new_tokens}: the answer "
                f"{problem.example.answer!r} needs {len(ids)}"
            )
        lengths[row] = len(ids)
        answers[row, : len(ids)] = ids
    slots = np.arange(prompts.shape[1] + max_new_tokens)
    end = prompts.shape[1] + lengths
    return Rollout(
        tokens=jnp.asarray(np.concatenate([prompts, answers], axis=1)),
        start=jnp.asarray(start),
        end=jnp.asarray(end),
        logprob=jnp.zeros((len(chosen), len(slots)), jnp.float32),
        mask=jnp.asarray((slots >= prompts.shape[1]) & (slots < end[:, None])),
        finished=jnp.ones(len(chosen), bool),
        rewards=jnp.zeros(len(chosen), jnp.float32),
    )


def teach_format(
    run: Run,
    problems: Problems,
    learner: Learner,
    state: TrainState,
    accuracy: Callable[[TrainState, int], float],
) -> TrainState:
    """Trains until `accuracy(state, step)` reaches `run.supervised.accuracy` or steps run out.

    Returns:
      The state with the trained weights; its optimiser is the supervised phase's.
    """
    config = run.supervised
    assert config is not None  # The caller's condition.
    cursor = PromptCursor(len(problems.supervised), run.seed)
    record: dict[str, float] = {}
    with ProgressBar(config.max_steps, description="supervised") as bar:
        for step in range(1, config.max_steps + 1):
            chosen = [problems.supervised[i] for i in cursor.take(config.batch)]
            rollout = worked_answers(problems, chosen, run.sampling.max_new_tokens)
            state, metrics = learner.supervised_update(state, rollout)
            record["supervised/loss"] = float(metrics["policy/loss"])
            if step % config.check_every == 0 or step == config.max_steps:
                record["evaluation/accuracy"] = accuracy(state, step)
            bar.update(step, record)
            if record.get("evaluation/accuracy", 0.0) >= config.accuracy:
                break
        bar.print(
            f"supervised: stopped after {step} steps at a sampled accuracy of "
            f"{record['evaluation/accuracy']:.3f}"
        )
    return state
