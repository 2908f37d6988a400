"""The training loop: sample, grade, learn, measure, save.

A step asks `grpo.prompts` problems `grpo.group_size` times each, grades the answers, and takes
`grpo.epochs` optimiser steps on them. Step s draws with keys that depend on (seed, s) alone and
takes the problems that the cursor names, so a run that is resumed from a checkpoint computes what
the unbroken run would have computed, bit for bit.

Before each rollout the weights are prepared a second time, by another program than the update's,
and the fingerprints compared: sampler and learner read the same bytes or the run stops.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.advantages import group_advantages, informative
from train.checkpoint import CheckpointFolder, Progress
from train.config import Run, Sampling
from train.data import PromptCursor
from train.diagnostics import rollout_metrics
from train.kl import kl_penalty
from train.learner import Batch, Learner, TrainState
from train.model import build_model
from train.problems import Problem, Problems
from train.rewards import OpenReward, soft_overlong_penalty
from train.rollout import Rollout, concatenate
from train.sampler import Sampler, request_keys
from train.supervised import teach_format
from train.weights import Weights, prepare, weight_hash

# Streams of random numbers, folded into the run's key.
_PARAMETERS, _SAMPLING, _EVALUATION, _SHUFFLE = range(4)


class Trainer:
    """One run: its problems, policy and state, and what happens in a step.

    Args:
      run: what to do.
      reward: grades the answers.
      problems: what is asked.
    """

    def __init__(self, run: Run, problems: Problems, reward: OpenReward) -> None:
        self.run = run
        self.problems = problems
        self.reward = reward
        self.key = jax.random.key(run.seed)
        model = build_model(run.model, jax.random.fold_in(self.key, _PARAMETERS))
        if model.config.vocab_size < problems.tokenizer.vocab_size:
            raise ValueError(
                f"the model's vocab_size={model.config.vocab_size} is smaller than the "
                f"tokenizer's {problems.tokenizer.vocab_size}"
            )
        self.graphdef, params = nnx.split(model, nnx.Param)
        self.learner = Learner(
            graphdef=self.graphdef,
            optimizer=run.optimizer,
            loss=run.loss,
            temperature=run.sampling.temperature,
            max_new_tokens=run.sampling.max_new_tokens,
            micro_batch=run.grpo.micro_batch,
        )
        self.sampler = self._sampler(run.sampling)
        self.evaluation_sampler = self._sampler(run.evaluation.sampling(run.sampling))
        self.cursor = PromptCursor(len(problems.train), run.seed)
        self.step = 0
        self.state = self.learner.init(params)
        self.reference: Weights | None = None

    def _sampler(self, sampling: Sampling) -> Sampler:
        tokenizer = self.problems.tokenizer
        return Sampler(self.graphdef, sampling, tokenizer.stop_ids, tokenizer.pad_id)

    # Before the first step.

    def start(self) -> None:
        """The supervised phase, if there is one, and the reference policy, if there is one."""
        if self.run.supervised is not None:
            learner = replace(
                self.learner,
                optimizer=self.run.supervised.optimizer,
                micro_batch=self.run.supervised.batch,
            )

            def accuracy(state: TrainState, step: int) -> float:
                # Far above any training step: other draws than those of any evaluation.
                return self.evaluate(state.weights, 2**31 + step)["evaluation/accuracy"]

            state = learner.init(self.state.weights.params)
            state = teach_format(self.run, self.problems, learner, state, accuracy)
            self.state = self.learner.init(state.weights.params)
        if self.run.loss.kl_coef > 0.0:
            self.reference = jax.tree.map(jnp.copy, self.state.weights)

    # Checkpoints.

    def _arrays(self) -> dict[str, Any]:
        state = self.state
        arrays = {
            "params": state.weights.params,
            "optimizer": state.optimizer,
            "steps": state.steps,
            "skipped": state.skipped,
            "key": jax.random.key_data(self.key),
        }
        if self.run.loss.kl_coef > 0.0:
            reference = self.reference or state.weights
            arrays["reference"] = reference.params
        return arrays

    def save(self, folder: CheckpointFolder) -> None:
        """Writes a checkpoint of the current step."""
        progress = Progress(self.step, self.cursor.state(), weight_hash(self.state.weights))
        folder.save(self._arrays(), progress)

    def restore(self, folder: CheckpointFolder) -> None:
        """Continues from the last checkpoint.

        Raises:
          FileNotFoundError: there is none.
          ValueError: it is of another run.
          RuntimeError: the weights prepared from it are not those that were saved.
        """
        arrays, progress = folder.restore(self._arrays())
        weights = prepare(arrays["params"], graphdef=self.graphdef)
        if weight_hash(weights) != progress.weight_hash:
            raise RuntimeError(
                f"the weights prepared from the checkpoint of step {progress.step} have the "
                f"fingerprint {weight_hash(weights)}, when it was saved {progress.weight_hash}: "
                "this machine or build quantises differently, so the run cannot continue exactly"
            )
        self.state = TrainState(weights, arrays["optimizer"], arrays["steps"], arrays["skipped"])
        if self.run.loss.kl_coef > 0.0:
            self.reference = prepare(arrays["reference"], graphdef=self.graphdef)
        self.key = jax.random.wrap_key_data(arrays["key"])
        self.cursor.restore(progress.cursor)
        self.step = progress.step

    # One step.

    def train_step(self) -> dict[str, float]:
        """Samples, grades and learns once. Returns the step's record."""
        begin = time.monotonic()
        self.step += 1
        self._check_weights()
        counts = self.reward.counts
        rollout, sampled, tokens = self._rollout()
        # Those of this step alone: a resumed run has to record the same.
        ended = {
            f"grading/{name}": float(count - counts[name])
            for name, count in self.reward.counts.items()
        }
        learned = self._learn(rollout)
        seconds = time.monotonic() - begin
        times = {"time/step": seconds, "time/tokens_per_second": tokens / seconds}
        return sampled | ended | learned | times

    def _check_weights(self) -> None:
        again = prepare(self.state.weights.params, graphdef=self.graphdef)
        ours, theirs = weight_hash(self.state.weights), weight_hash(again)
        if ours != theirs:
            raise RuntimeError(
                f"step {self.step}: the learner's quantised weights have the fingerprint {ours}, "
                f"the sampler's {theirs}; they must be the same bytes"
            )

    def _sample(self, chosen: Sequence[Problem], first_request: int) -> tuple[Rollout, np.ndarray]:
        """A rollout of the chosen problems with the rewards to learn from, and f32[N] the rewards
        as the grader gave them."""
        grpo = self.run.grpo
        tokens, start = self.problems.prompts(chosen)
        requests = first_request + np.arange(len(chosen) * grpo.group_size)
        keys = request_keys(jax.random.fold_in(self.key, _SAMPLING), self.step, requests)
        rollout = self.sampler(self.state.weights, tokens, start, keys, grpo.group_size)
        examples = [p.example for p in chosen for _ in range(grpo.group_size)]
        graded = np.asarray(self.reward(examples, self.problems.responses(rollout)), np.float32)
        rewards = graded
        if grpo.overlong_buffer:
            rewards = rewards + soft_overlong_penalty(
                np.asarray(rollout.mask).sum(axis=1),
                max_length=self.run.sampling.max_new_tokens,
                buffer=grpo.overlong_buffer,
            )
        if grpo.shuffle_rewards:
            shuffle = jax.random.fold_in(jax.random.fold_in(self.key, _SHUFFLE), self.step)
            rewards = rewards[np.asarray(jax.random.permutation(shuffle, len(rewards)))]
        return replace(rollout, rewards=jnp.asarray(rewards)), graded

    def _rollout(self) -> tuple[Rollout, dict[str, float], int]:
        """The rows to learn from; of all that were sampled the metrics and the tokens.

        Groups whose rewards differ come first, in the order of sampling; where there are too few
        of them, other groups fill the rows.
        """
        grpo = self.run.grpo
        rows = grpo.prompts * grpo.group_size
        rollouts: list[Rollout] = []
        graded: list[np.ndarray] = []
        missing, resampled = rows, 0
        while len(rollouts) <= grpo.resample and missing > 0:
            resampled += missing // grpo.group_size if rollouts else 0
            chosen = [self.problems.train[i] for i in self.cursor.take(grpo.prompts)]
            rollout, rewards = self._sample(chosen, len(rollouts) * rows)
            rollouts.append(rollout)
            graded.append(rewards)
            missing -= int(informative(rollout.rewards, grpo.group_size).sum())
        every = concatenate(rollouts)
        order = jnp.argsort(~informative(every.rewards, grpo.group_size), stable=True)
        metrics = rollout_metrics(
            jnp.concatenate(graded), every.rewards, every.mask, every.finished, grpo.group_size
        )
        record = {name: float(value) for name, value in jax.device_get(metrics).items()}
        record["sampling/resampled"] = float(resampled)
        return every.rows(order[:rows]), record, int(every.mask.sum())

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        """Takes the optimiser steps on one rollout."""
        grpo, loss = self.run.grpo, self.run.loss
        reference = None
        rewards = rollout.rewards
        # Dynamic sampling leaves groups of equal rewards out of the loss; without it they count in
        # the normaliser, with advantages of 0.
        learned = jnp.ones(rewards.shape, bool)
        if grpo.resample:
            learned = informative(rewards, grpo.group_size)
        if self.reference is not None:
            reference = self.learner.score(self.reference, rollout)[0]
            if loss.kl_place == "reward":
                penalty = kl_penalty(rollout.logprob, reference, rollout.mask)
                rewards = rewards - loss.kl_coef * penalty
        batch = Batch(
            rollout=rollout,
            advantages=group_advantages(
                rewards, grpo.group_size, std=loss.advantage_std, learned=learned
            ),
            learned=learned,
            old_logprob=rollout.logprob if grpo.old_logprob == "sampler" else None,
            reference_logprob=reference,
        )
        record: dict[str, Any] = {}
        for epoch in range(grpo.epochs):
            self.state, metrics, logprob = self.learner.update(self.state, batch)
            if epoch == 0:
                # The gap is that of the first inner step, where both have the same weights.
                record |= metrics
                if batch.old_logprob is None:
                    batch = replace(batch, old_logprob=logprob)
            else:
                record |= {k: v for k, v in metrics.items() if not k.startswith("gap/")}
        return {name: float(value) for name, value in jax.device_get(record).items()}

    # Measuring.

    def evaluate(self, weights: Weights, step: int) -> dict[str, float]:
        """Mean reward on the held-out problems, and how many are solved (reward 1 or more).

        `step`, 0 <= step < 2^32, decides the draws where the temperature is not 0.
        """
        heldout = self.problems.heldout
        size = min(len(heldout), self.run.grpo.prompts * self.run.grpo.group_size)
        key = jax.random.fold_in(self.key, _EVALUATION)
        rewards: list[float] = []
        for first in range(0, len(heldout), size):
            chosen = heldout[first : first + size]
            # The last batch is filled up: another size would be another program.
            padded = chosen + heldout[: size - len(chosen)]
            tokens, start = self.problems.prompts(padded)
            keys = request_keys(key, step, first + np.arange(size))
            rollout = self.evaluation_sampler(weights, tokens, start, keys)
            responses = self.problems.responses(rollout)[: len(chosen)]
            rewards += self.reward([p.example for p in chosen], responses)
        return {
            "evaluation/accuracy": float(np.mean([r >= 1.0 for r in rewards])),
            "evaluation/reward": float(np.mean(rewards)),
        }
