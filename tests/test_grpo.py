"""GRPO's advantages, loss and diagnostics against hand-computed numbers and a NumPy oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.advantages import group_advantages, informative
from train.diagnostics import gap_metrics, policy_metrics, rollout_metrics
from train.grpo import LossConfig, loss_normaliser, policy_loss, token_weights

AGGREGATIONS = ("token-mean", "sequence-mean", "constant-length")
MAX_LENGTH = 200


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def f32(values) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


def normaliser(mask, config: LossConfig) -> jax.Array:
    constant = config.aggregation == "constant-length"
    return loss_normaliser(mask, config.aggregation, max_length=MAX_LENGTH if constant else None)


# ---------------------------------------------------------------------------------- advantages


def test_advantages_by_hand():
    # Groups (1, 0, 0, 1), (2, 2, 2, 2) and (3, 1, 1, 1).
    rewards = f32([1, 0, 0, 1, 2, 2, 2, 2, 3, 1, 1, 1])
    # Means 0.5, 2, 1.5; centred:
    centred = np.array([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, 1.5, -0.5, -0.5, -0.5])
    # Sample variances: 4 * 0.25 / 3 = 1/3, 0, (2.25 + 3 * 0.25) / 3 = 1.
    by_group = centred / np.repeat([np.sqrt(1 / 3), 1, 1], 4)
    # Batch mean 16/12 = 4/3; squares sum to 2 + 16 + 9 + 3 = 30; 30 - 12 * 16/9 = 26/3; over 11.
    by_batch = centred / np.sqrt(26 / 33)
    for std, expected in (("none", centred), ("group", by_group), ("batch", by_batch)):
        got = group_advantages(rewards, 4, std=std)
        np.testing.assert_allclose(got, expected, rtol=3e-6, err_msg=std)
    np.testing.assert_array_equal(informative(rewards, 4), [True] * 4 + [False] * 4 + [True] * 4)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(std):
    # The fp32 mean of seven times 0.1 is not 0.1: the rounding must not become an advantage.
    rewards = f32([0.1] * 7 + [0.0] * 6 + [1.0])
    advantages = group_advantages(rewards, 7, std=std)
    assert rewards[:7].mean() != rewards[0]
    np.testing.assert_array_equal(advantages[:7], 0.0)
    assert np.all(np.abs(advantages[7:]) > 0.1)
    # A group of one has no one to be better than.
    np.testing.assert_array_equal(group_advantages(rewards, 1, std=std), 0.0)


@pytest.mark.parametrize(
    ("shape", "group_size", "std", "message"),
    [
        ((7,), 2, "group", r"\(7,\).*group_size=2"),
        ((4, 2), 2, "group", r"\(4, 2\)"),
        ((4,), 0, "group", "group_size=0"),
        ((4,), 2, "global", "std='global'.*'group', 'batch', 'none'"),
    ],
)
def test_advantage_errors(shape, group_size, std, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(jnp.zeros(shape), group_size, std=std)


# ------------------------------------------------------------------------------ loss, by hand

# Completions of three tokens, of one and of none, which does not count; slot 0 is the prompt's.
MASK = np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], bool)
RATIOS = np.array([[9, 1.1, 1.5, 0.5], [9, 0.7, 9, 9], [9, 9, 9, 9]])
ADVANTAGES = np.array([2.0, -1.0, 5.0])
# With clip_low 0.2 and clip_high 0.3:
#   A = 2:  min(1.1 * 2, 1.1 * 2) = 2.2;  min(1.5 * 2, 1.3 * 2) = 2.6;  min(0.5 * 2, 0.8 * 2) = 1.0
#   A = -1: min(0.7 * -1, 0.8 * -1) = -0.8
# The gradient of ratio * A is ratio * A where it is not clipped:
SLOPE = np.array([[0, 2.2, 0.0, 1.0], [0, 0.0, 0, 0], [0, 0, 0, 0]])
WEIGHTS = {
    "token-mean": np.full((3, 4), 1 / 4),
    "sequence-mean": np.array([[1 / 6] * 4, [1 / 2] * 4, [0] * 4]),
    "constant-length": np.full((3, 4), 1 / (2 * MAX_LENGTH)),
}


@functools.partial(jax.jit, static_argnames="config")
def loss_and_gradient(logprob, arrays, config):
    """Loss of a whole batch, and its gradient by log-prob [N, T]."""
    loss = functools.partial(
        policy_loss, normaliser=normaliser(arrays["mask"], config), config=config, **arrays
    )
    return jax.value_and_grad(loss)(logprob)


def loss_and_slope(config, ratios, advantages, mask, **arrays):
    """The same where pi / pi_old is `ratios`."""
    old_logprob = f32(np.full(mask.shape, -1.0))
    arrays |= {
        "old_logprob": old_logprob,
        "advantages": f32(advantages),
        "mask": jnp.asarray(mask),
    }
    return loss_and_gradient(old_logprob + f32(np.log(ratios)), arrays, config)


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


# ------------------------------------------------------------------- loss, against an oracle


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


FULL = LossConfig(dual_clip=1.5, sampler_ratio_cap=1.2, entropy_coef=0.3)


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


# --------------------------------------------------------------------- a policy with parameters

VOCABULARY = 5


def bigram(weights, tokens):
    """A policy whose next-token logits are a row of `weights`: log-probs and entropies [N, T]."""
    previous = jax.nn.one_hot(jnp.roll(tokens, 1, axis=1), VOCABULARY)
    rows = jax.nn.log_softmax(previous @ weights)
    logprob = jnp.take_along_axis(rows, tokens[..., None], axis=-1)[..., 0]
    return logprob, -(jnp.exp(rows) * rows).sum(axis=-1)


def bigram_batch(lengths, slots, seed=0):
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    tokens = rng.integers(0, VOCABULARY, (rows, slots)).astype(np.int32)
    mask = np.arange(slots) < 1 + np.array(lengths)[:, None]
    mask[:, 0] = False
    weights, old, sampler, reference = rng.normal(0, 0.5, (4, VOCABULARY, VOCABULARY))
    old, sampler = weights + 0.3 * old, weights + 0.3 * sampler
    rest = {
        name: bigram(f32(table), jnp.asarray(tokens))[0]
        for name, table in (("old", old), ("sampler", sampler), ("reference", reference))
    }
    advantages = f32(rng.normal(0, 1, rows))
    return f32(weights), {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask),
                          "advantages": advantages, **rest}  # fmt: skip


@functools.partial(jax.jit, static_argnames="config")
def bigram_loss(weights, piece, normaliser, config):
    def loss(weights):
        logprob, entropy = bigram(weights, piece["tokens"])
        return policy_loss(
            logprob,
            old_logprob=piece["old"],
            advantages=piece["advantages"],
            mask=piece["mask"],
            normaliser=normaliser,
            config=config,
            sampler_logprob=piece["sampler"],
            reference_logprob=piece["reference"],
            entropy=entropy,
        )

    return jax.value_and_grad(loss)(weights)


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


# ------------------------------------------------------------------------- nothing left, masks


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
        **rollout_metrics(rewards, batch["mask"], jnp.zeros(4, bool), group_size),
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


# --------------------------------------------------------------------------------- diagnostics


def test_gap_by_hand():
    sampler = f32([[-1.0, -2.0, -3.0]])
    learner = f32([[-1.0, -1.5, 77.0]])
    mask = jnp.array([[True, True, False]])
    got = gap_metrics(sampler, learner, mask)
    # log(learner / sampler) = 0.5 at the second token: e^0.5 - 1 - 0.5, over two tokens.
    expected = {"gap/mean_abs": 0.25, "gap/max_abs": 0.5, "gap/k3": (np.exp(0.5) - 1.5) / 2}
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6)
    for value in gap_metrics(sampler, sampler, mask).values():
        assert value == 0.0


def test_policy_metrics_by_hand():
    config = LossConfig(clip_low=0.2, clip_high=0.3, dual_clip=4.0, sampler_ratio_cap=2.0)
    old = jnp.full((3, 4), -1.0)
    got = policy_metrics(
        old + f32(np.log(RATIOS)),
        old_logprob=old,
        advantages=f32(ADVANTAGES),
        mask=jnp.asarray(MASK),
        entropy=f32([[100, 1, 2, 3], [100, 4, 100, 100], [100] * 4]),
        config=config,
        sampler_logprob=f32([[-9, -1, -1, -9], [-9, -1, -9, -9], [-9] * 4]),
        reference_logprob=old + f32(np.log(RATIOS)) + jnp.log(2.0),
    )
    expected = {
        "policy/entropy": 2.5,
        "policy/ratio_min": 0.5,
        "policy/ratio_max": 1.5,
        "policy/clip_low": 1 / 4,  # 0.7 with A = -1
        "policy/clip_high": 1 / 4,  # 1.5 with A = 2
        "policy/clip_dual": 0.0,
        "policy/sampler_capped": 1 / 4,
        "policy/kl": 1 + -np.log(2),  # k3: 2 - 1 - log 2
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)


def test_rollout_metrics_by_hand():
    mask = jnp.asarray(np.arange(6) < np.array([[2], [5], [3], [6]]))
    got = rollout_metrics(f32([1, 1, 0, 2]), mask, jnp.array([True, True, True, False]), 2)
    expected = {
        "reward/mean": 1.0,
        "reward/std": np.sqrt(0.5),
        "reward/min": 0.0,
        "reward/max": 2.0,
        "reward/zero_variance": 0.5,
        "length/mean": 4.0,
        "length/min": 2.0,
        "length/max": 6.0,
        "length/truncated": 0.25,
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)


# -------------------------------------------------------------------------------------- errors


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
        ({"kl_place": "reward"}, "loss.kl-estimator='k3' with loss.kl-place='reward': must be 'k1'"),
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
