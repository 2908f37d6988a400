"""KL divergence between two policies, estimated from sampled tokens.

With x drawn from p and d = log p(x) - log q(x), three estimators of KL(p || q) are in use
(J. Schulman, "Approximating KL divergence", 2020):

    k1 = d                   unbiased, may be negative
    k2 = d^2 / 2             biased, low variance
    k3 = exp(-d) - 1 + d     unbiased, never negative

**Value and gradient are two questions.** Differentiating an estimator as if the sampled token
were fixed drops the part of the gradient that comes through the sampling: k1 then has an expected
gradient of zero and k3 that of the reverse divergence. The gradient of KL(p || q) with respect to
p is E[d * grad log p(x)], and that is what `kl_loss` gives whichever estimator supplies the value.
With tokens drawn from an older policy both are weighted by p / p_old ("unbiased KL estimate" of
DeepSeek-V3.2, 2025). See also Tang and Munos, "On a few pitfalls in KL divergence gradient
estimation for RL" (2025), and Liu et al., "Rethinking KL regularization in RLHF" (2025).

`kl_loss` takes the prefixes as given: it is the gradient of the divergence of each next-token
distribution, summed over the visited prefixes. `kl_penalty`, subtracted from the reward, also
carries what a token does to the divergence of later ones: the gradient of the divergence of whole
completions. Only k1 may be used there, since E[k2 * grad log p] and E[k3 * grad log p] are not
gradients of this divergence.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Estimator = Literal["k1", "k2", "k3"]

# exp(20) is 4.9e8: far outside any trust region, and its products stay finite in fp32.
MAX_LOG_RATIO = 20.0


def bounded_exp(log_ratio: jax.Array) -> jax.Array:
    """exp of a log-ratio limited to +-20, so that no ratio is infinite; same shape and dtype."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_estimate(logprob: jax.Array, other: jax.Array, estimator: Estimator) -> jax.Array:
    """Estimate KL(p || q) token by token, from tokens drawn from p.

    Args:
      logprob: f32[...], log p of the tokens.
      other: f32[...], log q of the same tokens.
      estimator: "k1", "k2" or "k3" of the module's docstring.

    Returns:
      f32[...], in nats. Derivatives of it are not those of the divergence; see `kl_loss`.
    """
    difference = jnp.clip(logprob - other, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return difference
        case "k2":
            return 0.5 * jnp.square(difference)
        case "k3":
            return jnp.expm1(-difference) + difference
        case _:
            raise ValueError(f"estimator={estimator!r}: legal values are 'k1', 'k2', 'k3'")


def kl_loss(
    logprob: jax.Array, old_logprob: jax.Array, reference: jax.Array, estimator: Estimator
) -> jax.Array:
    """KL(policy || reference) by token, to be added to a loss: right value, right gradient.

    Args:
      logprob: f32[...], log-probs under the policy that is trained (differentiated).
      old_logprob: f32[...], under the policy that the tokens were drawn from.
      reference: f32[...], under the reference policy.
      estimator: which estimator gives the value; the gradient is the same for all three.

    Returns:
      f32[...]. Its expectation over tokens from the old policy is KL(policy || reference) (for k2
      up to its bias) and the expectation of its gradient is that divergence's gradient.
    """
    fixed = lax.stop_gradient(logprob)
    ratio = bounded_exp(fixed - lax.stop_gradient(old_logprob))
    reference = lax.stop_gradient(reference)
    score = kl_estimate(fixed, reference, "k1") * (logprob - fixed)  # zero, with the gradient
    return ratio * (kl_estimate(fixed, reference, estimator) + score)


def kl_penalty(logprob: jax.Array, reference: jax.Array, mask: jax.Array) -> jax.Array:
    """KL(policy || reference) by completion, to be subtracted from the reward.

    Args:
      logprob: f32[N, T], log-probs under the policy that the completions were drawn from.
      reference: f32[N, T], under the reference policy.
      mask: bool[N, T], the completion's tokens.

    Returns:
      f32[N], the sum of k1 over the mask; no gradient flows through it.
    """
    estimate = kl_estimate(logprob, reference, "k1")
    return lax.stop_gradient(jnp.where(mask, estimate, 0.0).sum(axis=-1))
