"""Numbers that tell how an update went, computed once over a whole batch.

They are plain functions of the arrays that the loss is made of, and return flat dicts under the
names that metrics.py lists. Every mean is over the mask; of an empty mask, means are 0 and
extremes neutral (ratio 1, lengths 0), so that no number is NaN.
"""

import jax
import jax.numpy as jnp

from train.advantages import informative
from train.grpo import LossConfig, clipped, importance_ratio
from train.kl import bounded_exp, kl_estimate

Metrics = dict[str, jax.Array]


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of values[...] where mask bool[...] is true: f32[], 0 of nothing."""
    total = jnp.where(mask, values, 0.0).sum(dtype=jnp.float32)
    return total / jnp.maximum(mask.sum(dtype=jnp.float32), 1.0)


def gap_metrics(sampler_logprob: jax.Array, logprob: jax.Array, mask: jax.Array) -> Metrics:
    """How far the learner's log-probs are from the sampler's, before the first optimiser step.

    Args:
      sampler_logprob: f32[N, T], of the distribution that the tokens were drawn from.
      logprob: f32[N, T], of the learner at the same weights and temperature.
      mask: bool[N, T].

    Returns:
      gap/mean_abs and gap/max_abs in nats, gap/k3: the k3 estimate of KL(sampler || learner).
      All are exactly 0 when both compute the same thing.
    """
    distance = jnp.where(mask, jnp.abs(logprob - sampler_logprob), 0.0)
    return {
        "gap/mean_abs": masked_mean(distance, mask),
        "gap/max_abs": distance.max(initial=0.0),
        "gap/k3": masked_mean(kl_estimate(sampler_logprob, logprob, "k3"), mask),
    }


def policy_metrics(
    logprob: jax.Array,
    *,
    old_logprob: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    entropy: jax.Array,
    config: LossConfig,
    sampler_logprob: jax.Array | None = None,
    reference_logprob: jax.Array | None = None,
) -> Metrics:
    """Entropy, ratios, clip fractions and the divergence to the reference of one inner step.

    Args: as of `grpo.policy_loss`, of the whole batch.
    """
    ratio = importance_ratio(logprob, old_logprob, mask, config.ratio)
    smallest, largest = ratio.min(), ratio.max()  # outside the mask the ratio is 1
    metrics = {
        "policy/entropy": masked_mean(entropy, mask),
        "policy/ratio_min": jnp.where(mask, ratio, largest).min(),
        "policy/ratio_max": jnp.where(mask, ratio, smallest).max(),
    }
    for name, where in clipped(ratio, advantages, config).items():
        if name != "dual" or config.dual_clip is not None:
            metrics[f"policy/clip_{name}"] = masked_mean(where.astype(jnp.float32), mask)
    if config.sampler_ratio_cap is not None and sampler_logprob is not None:
        above = bounded_exp(old_logprob - sampler_logprob) > config.sampler_ratio_cap
        metrics["policy/sampler_capped"] = masked_mean(above.astype(jnp.float32), mask)
    if reference_logprob is not None:
        estimate = kl_estimate(logprob, reference_logprob, config.kl_estimator)
        metrics["policy/kl"] = masked_mean(estimate, mask)
    return metrics


def rollout_metrics(
    graded: jax.Array, shaped: jax.Array, mask: jax.Array, finished: jax.Array, group_size: int
) -> Metrics:
    """What was sampled.

    Args:
      graded: f32[N], the rewards as the grader gave them.
      shaped: f32[N], the rewards that are learned from: with the overlong penalty.
      mask: bool[N, T], the completions' tokens (all of them, before any filtering).
      finished: bool[N], stopped by itself; the others were truncated.
      group_size: completions per prompt.
    """
    lengths = mask.sum(axis=-1, dtype=jnp.float32)
    return {
        "reward/mean": graded.mean(),
        "reward/std": graded.std(),
        "reward/min": graded.min(),
        "reward/max": graded.max(),
        "reward/shaped_mean": shaped.mean(),
        "reward/zero_variance": 1.0 - informative(shaped, group_size).mean(dtype=jnp.float32),
        "length/mean": lengths.mean(),
        "length/min": lengths.min(),
        "length/max": lengths.max(),
        "length/truncated": 1.0 - finished.mean(dtype=jnp.float32),
    }
