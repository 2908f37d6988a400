"""The GRPO loss against hand-computed numbers and a NumPy oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_cases import (
    ADVANTAGES,
    AGGREGATIONS,
    FULL,
    MASK,
    MAX_LENGTH,
    RATIOS,
    SLOPE,
    WEIGHTS,
    f32,
    loss_and_gradient,
    loss_and_slope,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from train.grpo import LossConfig, loss_normaliser, policy_loss, token_weights


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_clipped_loss_by_hand(aggregation):
    config = LossConfig(aggregation=aggregation, clip_low=0.2, clip_high=0.3)
    loss, slope = loss_and_slope(config, RATIOS, ADVANTAGES, MASK)
    weights = WEIGHTS[aggregation]
    # token-mean: -(2.2 + 2.6 + 1.0 - 0.8) / 4 = -1.25; sequence-mean: -(5.8 / 3 - 0.8) / 2
    by_hand = {"token-mean": -1.25, "sequence-mean": -1.7 / 3, "constant-length": -0.0125}
    np.testing.assert_allclose(loss, by_hand[aggregation], rtol=1e-6)
    np.testing.assert_allclose(slope, -weights * SLOPE, rtol=2e-6)


def test_dual_clip_by_hand():
    # A = -1, ratio 5: without a limit -5; no lower than 3 * -1 with one, and then no gradient.
    mask, ratios = np.ones((1, 2), bool), np.array([[5.0, 1.0]])
    for dual_clip, expected, expected_slope in ((None, 3.0, [2.5, 0.5]), (3.0, 2.0, [0.0, 0.5])):
        config = LossConfig(dual_clip=dual_clip)
        loss, slope = loss_and_slope(config, ratios, [-1.0], mask)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        np.testing.assert_allclose(slope, [expected_slope], rtol=1e-6)
    # With a positive advantage the ratio is clipped at 1.28 whatever dual_clip is.
    loss, _ = loss_and_slope(LossConfig(dual_clip=3.0), ratios, [1.0], mask)
    np.testing.assert_allclose(loss, -(1.28 + 1.0) / 2, rtol=1e-6)


def test_truncated_importance_sampling_by_hand():
    # pi_old / pi_sampler is 1.5 and 4, capped at 2: -(1.5 * 1 + 2 * 1) / 2, on policy, A = 1.
    sampler_logprob = f32([[-1.0 - np.log(1.5), -1.0 - np.log(4.0)]])
    loss, slope = loss_and_slope(
        LossConfig(sampler_ratio_cap=2.0),
        np.ones((1, 2)),
        [1.0],
        np.ones((1, 2), bool),
        sampler_logprob=sampler_logprob,
    )
    np.testing.assert_allclose(loss, -1.75, rtol=1e-6)
    np.testing.assert_allclose(slope, [[-0.75, -1.0]], rtol=1e-6)


def test_entropy_bonus_by_hand():
    # Advantages 0; entropies 1, 2 and 6 with coefficient 0.1: -(0.1 * 9) / 3; the 50 is masked.
    mask = np.array([[1, 1, 1, 0]], bool)
    entropy = f32([[1, 2, 6, 50]])
    config = LossConfig(entropy_coef=0.1)
    loss, slope = loss_and_slope(config, np.ones((1, 4)), [0.0], mask, entropy=entropy)
    np.testing.assert_allclose(loss, -0.3, rtol=1e-6)
    np.testing.assert_array_equal(slope, 0.0)

    def of_entropy(x):
        return loss_and_slope(config, np.ones((1, 4)), [0.0], mask, entropy=x)[0]

    np.testing.assert_allclose(jax.grad(of_entropy)(entropy), [[-0.1 / 3] * 3 + [0]], rtol=1e-6)


def test_sequence_ratio_by_hand():
    # Log-ratios 0.3, -0.1, 0.1 (mean 0.1) and -0.5, -0.1 (mean -0.3); A = 1 and -2.
    mask = np.array([[1, 1, 1], [1, 0, 1]], bool)
    ratios = np.exp([[0.3, -0.1, 0.1], [-0.5, 7.0, -0.1]])
    config = LossConfig(aggregation="sequence-mean", ratio="sequence", clip_low=0.5)
    loss, slope = loss_and_slope(config, ratios, [1.0, -2.0], mask)
    first, second = np.exp(0.1), np.exp(-0.3)
    np.testing.assert_allclose(loss, -(first - 2 * second) / 2, rtol=1e-6)
    # GSPO's gradient: s_i A_i * mean_t grad log pi_t, averaged over completions.
    expected = [[-first / 6] * 3, [2 * second / 4, 0, 2 * second / 4]]
    np.testing.assert_allclose(slope, expected, rtol=1e-6)


# --- Against an oracle ---


def oracle_loss(logprob, old, sampler, entropy, advantages, mask, config: LossConfig) -> float:
    """The loss without a KL term, as the papers write it, in fp64 loops."""
    rows = [i for i in range(len(mask)) if mask[i].any()]
    tokens = sum(mask[i].sum() for i in rows)
    total = 0.0
    for i in rows:
        slots = [t for t in range(mask.shape[1]) if mask[i, t]]
        mean = np.mean([logprob[i, t] - old[i, t] for t in slots])
        for t in slots:
            ratio = np.exp(mean if config.ratio == "sequence" else logprob[i, t] - old[i, t])
            a = advantages[i]
            inside = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            objective = min(ratio * a, inside * a)
            if a < 0 and config.dual_clip is not None:
                objective = max(objective, config.dual_clip * a)
            if config.sampler_ratio_cap is not None:
                objective *= min(np.exp(old[i, t] - sampler[i, t]), config.sampler_ratio_cap)
            objective += config.entropy_coef * entropy[i, t]
            total += (
                objective
                / {
                    "token-mean": tokens,
                    "sequence-mean": len(slots) * len(rows),
                    "constant-length": MAX_LENGTH * len(rows),
                }[config.aggregation]
            )
    return -total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("ratio", ["token", "sequence"])
# Fixed examples: a difference quotient may not straddle the edge of a clip.
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_loss_equals_oracle(aggregation, ratio, seed):
    # With weights by token, GSPO-token differs from the derivative of GSPO's objective.
    cap = FULL.sampler_ratio_cap if ratio == "token" else None
    config = dataclasses.replace(FULL, aggregation=aggregation, ratio=ratio, sampler_ratio_cap=cap)
    rng = np.random.default_rng(seed)
    old, entropy = -rng.exponential(1, (2, 4, 6)).astype(np.float32)
    logprob = old + rng.normal(0, 0.5, (4, 6)).astype(np.float32)
    sampler = old + rng.normal(0, 0.3, (4, 6)).astype(np.float32)
    advantages = rng.normal(0, 1, 4).astype(np.float32)
    mask = rng.random((4, 6)) < rng.choice([0.1, 0.5, 0.9])
    arrays = [x.astype(np.float64) for x in (logprob, old, sampler, entropy, advantages)]
    given_arrays = {
        "old_logprob": f32(old),
        "sampler_logprob": f32(sampler),
        "entropy": f32(entropy),
        "advantages": f32(advantages),
        "mask": jnp.asarray(mask),
    }
    loss, gradient = loss_and_gradient(f32(logprob), given_arrays, config)
    np.testing.assert_allclose(loss, oracle_loss(*arrays, mask, config), rtol=1e-5, atol=1e-6)
    # The gradient, by central differences of the oracle.
    step = 1e-5
    for i, t in np.ndindex(4, 6):
        shift = np.zeros((4, 6))
        shift[i, t] = step
        above, below = (
            oracle_loss(arrays[0] + s, *arrays[1:], mask, config) for s in (shift, -shift)
        )
        np.testing.assert_allclose(gradient[i, t], (above - below) / (2 * step), atol=2e-5)


# --- Errors ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mean"}, "aggregation='mean'.*'token-mean', 'sequence-mean'"),
        ({"ratio": "gspo"}, "ratio='gspo'.*'token', 'sequence'"),
        ({"advantage_std": True}, "loss.advantage-std=True.*'group', 'batch', 'none'"),
        ({"kl_estimator": "k4"}, "loss.kl-estimator='k4'.*'k1', 'k2', 'k3'"),
        ({"kl_place": "both"}, "loss.kl-place='both'.*'loss', 'reward'"),
        ({"kl_coef": -0.1}, "loss.kl-coef=-0.1.*0 or more"),
        ({"kl_coef": float("nan")}, "loss.kl-coef=nan"),
        ({"clip_low": 1.5}, "loss.clip-low=1.5.*between 0 and 1"),
        ({"clip_high": -0.2}, "loss.clip-high=-0.2.*0 or more"),
        ({"dual_clip": 1.2}, "loss.dual-clip=1.2.*above 1.28"),
        ({"sampler_ratio_cap": 0.0}, "loss.sampler-ratio-cap=0.0.*above 0"),
        ({"entropy_coef": float("inf")}, "loss.entropy-coef=inf.*finite"),
        ({"kl_place": "reward"}, "kl-estimator='k3' with loss.kl-place='reward': must be 'k1'"),
    ],
)
def test_config_errors(options, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**options)


@pytest.mark.parametrize(
    ("options", "changes", "error", "message"),
    [
        ({"kl_coef": 0.1}, {}, ValueError, "loss.kl-coef=0.1 needs reference_logprob"),
        ({"entropy_coef": 0.1}, {}, ValueError, "loss.entropy-coef=0.1 needs entropy"),
        (
            {"sampler_ratio_cap": 2.0},
            {},
            ValueError,
            "loss.sampler-ratio-cap=2.0 needs sampler_logprob",
        ),
        ({}, {"mask": jnp.ones((2, 3), jnp.int32)}, TypeError, "mask has dtype int32"),
        ({}, {"mask": jnp.ones((2, 1), bool)}, ValueError, r"mask has shape \(2, 1\)"),
        ({}, {"advantages": jnp.ones((2, 3))}, ValueError, r"advantages has shape \(2, 3\)"),
        ({}, {"old_logprob": jnp.ones((3, 3))}, ValueError, r"old_logprob has shape \(3, 3\)"),
    ],
)
def test_loss_errors(options, changes, error, message):
    arrays = {
        "old_logprob": jnp.ones((2, 3)),
        "advantages": jnp.ones(2),
        "mask": jnp.ones((2, 3), bool),
        "normaliser": jnp.ones(()),
        **changes,
    }
    with pytest.raises(error, match=message):
        policy_loss(jnp.ones((2, 3)), config=LossConfig(**options), **arrays)


def test_normaliser():
    mask = jnp.asarray(MASK)
    assert loss_normaliser(mask, "token-mean") == 4.0
    assert loss_normaliser(mask, "sequence-mean") == 2.0
    assert loss_normaliser(mask, "constant-length", max_length=10) == 20.0
    for aggregation in AGGREGATIONS:
        weights = token_weights(mask, aggregation, jnp.ones(()))
        np.testing.assert_array_equal(np.asarray(weights)[~MASK], 0.0)
    with pytest.raises(ValueError, match="max_length=None with aggregation='constant-length'"):
        loss_normaliser(mask, "constant-length")
    with pytest.raises(ValueError, match="max_length=5 with aggregation='token-mean'"):
        loss_normaliser(mask, "token-mean", max_length=5)
