"""The GRPO loss of a policy with parameters: cuts of the batch, on-policy gradient, empty masks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_cases import (
    AGGREGATIONS,
    FULL,
    MAX_LENGTH,
    VOCABULARY,
    bigram,
    bigram_batch,
    bigram_loss,
    f32,
    loss_and_gradient,
    loss_and_slope,
    normaliser,
)

from train.advantages import group_advantages
from train.diagnostics import gap_metrics, policy_metrics, rollout_metrics
from train.grpo import LossConfig


@pytest.mark.parametrize(
    ("aggregation", "ratio"),
    [(aggregation, "token") for aggregation in AGGREGATIONS] + [("sequence-mean", "sequence")],
)
def test_cutting_the_batch_changes_nothing(aggregation, ratio):
    config = dataclasses.replace(FULL, aggregation=aggregation, ratio=ratio, kl_coef=0.1)
    weights, batch = bigram_batch([1, 200, 3, 57, 0, 120, 9, 31], slots=201)
    whole = normaliser(batch["mask"], config)
    loss, gradient = bigram_loss(weights, batch, whole, config)
    assert np.abs(loss) > 1e-3
    assert np.linalg.norm(gradient) > 1e-3
    for sizes in ([4] * 2, [2] * 4, [1] * 8, [1, 4, 2, 1], [2, 1, 1, 4]):
        losses, gradients, start = [], [], 0
        for size in sizes:
            piece = {name: x[start : start + size] for name, x in batch.items()}
            start += size
            piece_loss, piece_gradient = bigram_loss(weights, piece, whole, config)
            losses.append(piece_loss)
            gradients.append(piece_gradient)
        np.testing.assert_allclose(sum(losses), loss, rtol=1e-6)
        error = np.linalg.norm(sum(gradients) - gradient) / np.linalg.norm(gradient)
        assert error < 1e-6, sizes


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_policy_gradient_is_reinforce(aggregation):
    config = LossConfig(aggregation=aggregation)
    weights, batch = bigram_batch([3, 8, 1, 0], slots=9)
    mask, advantages = batch["mask"], batch["advantages"]
    batch["old"] = bigram(weights, batch["tokens"])[0]
    _, gradient = bigram_loss(weights, batch, normaliser(mask, config), config)
    per_token = {
        "token-mean": np.full(4, 1 / 12),
        "sequence-mean": np.array([1 / 9, 1 / 24, 1 / 3, 0]),
        "constant-length": np.full(4, 1 / (3 * MAX_LENGTH)),
    }[aggregation]
    # REINFORCE, written out: softmax's derivative of log pi(token | previous) is onehot - pi.
    probabilities = np.asarray(jax.nn.softmax(weights), np.float64)
    expected = np.zeros((VOCABULARY, VOCABULARY))
    tokens = np.asarray(batch["tokens"])
    for i, t in zip(*np.nonzero(np.asarray(mask)), strict=True):
        previous = tokens[i, t - 1]
        score = np.eye(VOCABULARY)[tokens[i, t]] - probabilities[previous]
        expected[previous] -= per_token[i] * float(advantages[i]) * score
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    assert np.abs(expected).max() > 1e-4


# --- Nothing left, masks ---


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("case", ["all masked", "equal rewards", "group of one"])
def test_nothing_left_is_zero_and_finite(aggregation, case):
    config = LossConfig(aggregation=aggregation, sampler_ratio_cap=2.0, dual_clip=3.0)
    weights, batch = bigram_batch([4, 5, 2, 3], slots=6)
    group_size = 1 if case == "group of one" else 2
    rewards = f32([1.0, 0.0, 0.0, 1.0]) if case != "equal rewards" else f32([0.1] * 4)
    if case == "all masked":
        batch["mask"] = jnp.zeros_like(batch["mask"])
    batch["advantages"] = group_advantages(rewards, group_size)
    loss, gradient = bigram_loss(weights, batch, normaliser(batch["mask"], config), config)
    assert loss == 0.0
    np.testing.assert_array_equal(gradient, 0.0)
    logprob, entropy = bigram(weights, batch["tokens"])
    metrics = {
        **policy_metrics(
            logprob,
            old_logprob=batch["old"],
            advantages=batch["advantages"],
            mask=batch["mask"],
            entropy=entropy,
            config=config,
            sampler_logprob=batch["sampler"],
            reference_logprob=batch["reference"],
        ),
        **gap_metrics(batch["sampler"], logprob, batch["mask"]),
        **rollout_metrics(rewards, rewards, batch["mask"], jnp.zeros(4, bool), group_size),
    }
    for name, value in metrics.items():
        assert np.isfinite(value), name
    assert metrics["length/truncated"] == 1.0
    if case == "all masked":
        assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0


def test_mask_alone_says_what_is_trained():
    """One id is padding and end: the real end is trained, padding is not, nor what it holds."""
    end = pad = 4
    tokens = jnp.array([[0, 1, pad, 2, end, pad, pad]])  # the id also occurs in the middle
    mask = jnp.array([[False, True, True, True, True, False, False]])
    weights, _ = bigram_batch([1], slots=2)
    old = bigram(weights, tokens)[0]
    config = LossConfig(kl_coef=0.1, sampler_ratio_cap=2.0, entropy_coef=0.1)

    def gradient_by_token(outside):
        arrays = {"old_logprob": old, "sampler_logprob": old, "reference_logprob": old - 0.1}
        arrays |= {"entropy": -old}
        arrays = {name: jnp.where(mask, x, outside) for name, x in arrays.items()}
        arrays |= {"mask": mask, "advantages": f32([1.0])}
        return loss_and_gradient(jnp.where(mask, old, outside), arrays, config)[1]

    gradient = gradient_by_token(0.0)
    assert np.all(np.abs(gradient[0, 1:5]) > 0.1)
    np.testing.assert_array_equal(gradient[0, 5:], 0.0)
    for outside in (jnp.nan, jnp.inf, -1e30):
        np.testing.assert_array_equal(gradient_by_token(outside), gradient)


def test_infinite_ratio_stays_finite():
    # The old policy gave a token probability e^-500: clipped for A > 0, huge but finite for A < 0.
    for advantage in (1.0, -1.0):
        loss, slope = loss_and_slope(
            LossConfig(kl_coef=0.1),
            np.exp([[500.0, -500.0, 0.0]]),
            [advantage],
            np.ones((1, 3), bool),
            reference_logprob=f32([[-900.0, 900.0, -1.0]]),
        )
        assert np.isfinite(loss)
        assert np.all(np.isfinite(slope))
