"""KL estimators against divergences and gradients enumerated over toy policies."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.grpo import LossConfig, loss_normaliser, policy_loss
from train.kl import kl_estimate, kl_loss, kl_penalty

ESTIMATORS = ("k1", "k2", "k3")
LOGITS = np.array([0.4, -0.3, 0.9])
REFERENCE = np.array([0.1, 0.6, -0.5])


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def f32(values) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


def softmax(logits):
    exponentials = np.exp(logits)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def exact_kl(logits, reference):
    """KL(softmax(logits) || softmax(reference)) over the last axis, and its gradient by logits.

    d KL / d logit_j = p_j (log(p_j / q_j) - KL).
    """
    p, q = softmax(logits), softmax(reference)
    divergence = (p * np.log(p / q)).sum(axis=-1, keepdims=True)
    return divergence[..., 0], p * (np.log(p / q) - divergence)


def test_estimates_by_hand():
    # log p - log q = log 2: k1 = log 2, k2 = log(2)^2 / 2, k3 = 1/2 - 1 + log 2.
    logprob, other = f32([-1.0]), f32([-1.0 - np.log(2.0)])
    expected = {"k1": np.log(2), "k2": np.log(2) ** 2 / 2, "k3": np.log(2) - 0.5}
    for estimator, value in expected.items():
        np.testing.assert_allclose(kl_estimate(logprob, other, estimator), [value], rtol=1e-6)
        assert kl_estimate(other, other, estimator) == 0.0
    # Near equality k3 is d^2 / 2, which exp(-d) - 1 would round away.
    tiny = kl_estimate(f32([1e-3]), f32([0.0]), "k3")
    np.testing.assert_allclose(tiny, [0.5e-6 - 1e-9 / 6], rtol=1e-3)
    with pytest.raises(ValueError, match=r"estimator='k4'.*'k1', 'k2', 'k3'"):
        kl_estimate(logprob, other, "k4")  # pyright: ignore[reportArgumentType]


def test_expected_values_are_the_divergence():
    p, q = softmax(LOGITS), softmax(REFERENCE)
    divergence, _ = exact_kl(LOGITS, REFERENCE)
    for estimator in ("k1", "k3"):
        values = kl_estimate(f32(np.log(p)), f32(np.log(q)), estimator)
        np.testing.assert_allclose(p @ np.asarray(values), divergence, rtol=1e-5)
    assert np.all(kl_estimate(f32(np.log(p)), f32(np.log(q)), "k3") >= 0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("old", [LOGITS, np.zeros(3)], ids=["on policy", "off policy"])
def test_in_loss_gradient_is_exact(estimator, old):
    """Every token weighted by its probability under the policy that it is drawn from."""
    drawn = softmax(old)

    def expected_term(logits):
        logprob = jax.nn.log_softmax(logits)
        term = kl_loss(logprob, f32(np.log(drawn)), f32(np.log(softmax(REFERENCE))), estimator)
        return f32(drawn) @ term

    value, gradient = jax.value_and_grad(expected_term)(f32(LOGITS))
    divergence, exact_gradient = exact_kl(LOGITS, REFERENCE)
    np.testing.assert_allclose(gradient, exact_gradient, atol=1e-6)
    if estimator != "k2":
        np.testing.assert_allclose(value, divergence, rtol=1e-5)


def loss_gradient(logits, tokens, config, rewards=None, reference=REFERENCE):
    """Gradient of the policy loss alone, over completions of one token from `logits`' policy."""
    tokens = jnp.asarray(tokens)
    mask = jnp.ones((tokens.shape[0], 1), bool)
    reference_logprob = f32(np.log(softmax(reference)))[tokens][:, None]
    old = jax.nn.log_softmax(f32(logits))[tokens][:, None]
    advantages = jnp.zeros(tokens.shape) if rewards is None else rewards

    if config.kl_place == "reward":
        advantages -= config.kl_coef * kl_penalty(old, reference_logprob, mask)

    def loss(logits):
        return policy_loss(
            jax.nn.log_softmax(logits)[tokens][:, None],
            old_logprob=old,
            advantages=advantages,
            mask=mask,
            normaliser=loss_normaliser(mask, "token-mean"),
            config=config,
            reference_logprob=reference_logprob,
        )

    return jax.grad(loss)(f32(logits))


PLACES = [("loss", "k1"), ("loss", "k2"), ("loss", "k3"), ("reward", "k1")]


@pytest.mark.parametrize(("place", "estimator"), PLACES)
def test_policy_loss_carries_the_exact_gradient(place, estimator):
    """A policy of probabilities 1/2, 1/4, 1/4, and its tokens in exactly these proportions."""
    logits = np.log([0.5, 0.25, 0.25])
    config = LossConfig(kl_coef=0.7, kl_estimator=estimator, kl_place=place)
    gradient = loss_gradient(logits, [0, 0, 1, 2], config)
    _, exact_gradient = exact_kl(logits, REFERENCE)
    assert np.abs(exact_gradient).min() > 0.05
    np.testing.assert_allclose(gradient, 0.7 * exact_gradient, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_why_only_k1_may_stand_in_the_reward(estimator):
    """The score-function gradient of the other estimators is that of something else."""
    p, q = softmax(LOGITS), softmax(REFERENCE)
    values = np.asarray(kl_estimate(f32(np.log(p)), f32(np.log(q)), estimator))
    score_function = p * (values - p @ values)  # sum_x p_x k_x d log p_x / d logits
    _, exact_gradient = exact_kl(LOGITS, REFERENCE)
    assert np.abs(score_function - exact_gradient).max() > 0.05
    with pytest.raises(ValueError, match="must be 'k1' there"):
        LossConfig(kl_coef=0.1, kl_place="reward", kl_estimator=estimator)


def test_completions_of_two_tokens():
    """In the reward: gradient for whole completions. In the loss: for each visited prefix."""
    first, second = np.array([0.3, -0.2, 0.5]), np.array([[0.1, 0.9, 0], [-1, 0, 1], [2, 0, 0.5]])
    reference = (np.array([0.0, 0.5, -0.5]), np.array([[0.4, 0, 0], [1, 0, 0.3], [0, 1, 0]]))
    tokens = jnp.array(list(itertools.product(range(3), repeat=2)))
    p = softmax(first)
    drawn = f32([p[x] * softmax(second)[x, y] for x, y in np.asarray(tokens)])
    mask = jnp.ones((9, 2), bool)

    def logprobs(policy):
        head, tail = (jax.nn.log_softmax(f32(logits)) for logits in policy)
        return jnp.stack([head[tokens[:, 0]], tail[tokens[:, 0], tokens[:, 1]]], axis=1)

    policy, old, other = (f32(first), f32(second)), logprobs((first, second)), logprobs(reference)

    def in_reward(policy):
        penalty = kl_penalty(old, other, mask)
        return drawn @ (penalty * logprobs(policy).sum(axis=1))

    def in_loss(policy):
        return drawn @ kl_loss(logprobs(policy), old, other, "k3").sum(axis=1)

    # KL of completions = KL of the first token + sum_x p(x) KL of the second after x.
    first_kl, by_first = exact_kl(first, reference[0])
    second_kl, by_second = exact_kl(second, reference[1])
    through_prefix = p * (second_kl - p @ second_kl)
    got = jax.grad(in_reward)(policy)
    np.testing.assert_allclose(got[0], by_first + through_prefix, atol=1e-6)
    np.testing.assert_allclose(got[1], p[:, None] * by_second, atol=1e-6)
    value, got = jax.value_and_grad(in_loss)(policy)
    np.testing.assert_allclose(value, first_kl + p @ second_kl, rtol=1e-5)
    np.testing.assert_allclose(got[0], by_first, atol=1e-6)
    np.testing.assert_allclose(got[1], p[:, None] * by_second, atol=1e-6)


@pytest.mark.parametrize(("place", "estimator"), PLACES)
def test_alone_it_lowers_the_divergence(place, estimator):
    """Fifty steps from sampled tokens, with no reward at all."""
    config = LossConfig(kl_coef=0.5, kl_estimator=estimator, kl_place=place)
    step = jax.jit(
        lambda logits, tokens: logits - loss_gradient(logits, tokens, config, reference=far)
    )
    far = np.array([1.5, -1.5, 0.0])
    logits = f32([-1.0, 1.0, 0.5])
    rng = np.random.default_rng(0)
    before, _ = exact_kl(np.asarray(logits), far)
    for _ in range(50):
        tokens = rng.choice(3, size=64, p=softmax(np.asarray(logits, np.float64)))
        logits = step(logits, tokens)
    after, _ = exact_kl(np.asarray(logits), far)
    assert before > 1.0
    assert after < 0.05 * before


def test_penalty_by_hand():
    logprob = f32([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]])
    reference = f32([[-1.5, -1.0, 50.0], [-1.0, -1.0, np.nan]])
    mask = jnp.array([[True, True, False], [True, False, False]])
    np.testing.assert_allclose(kl_penalty(logprob, reference, mask), [0.5 - 1.0, 0.0])
