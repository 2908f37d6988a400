"""What the tests of the GRPO loss share: hand-made batches, and a small policy with parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from train.grpo import LossConfig, loss_normaliser, policy_loss

AGGREGATIONS = ("token-mean", "sequence-mean", "constant-length")
MAX_LENGTH = 200
FULL = LossConfig(dual_clip=1.5, sampler_ratio_cap=1.2, entropy_coef=0.3)


def f32(values) -> jax.Array:
    return jnp.asarray(values, jnp.float32)


def normaliser(mask, config: LossConfig) -> jax.Array:
    constant = config.aggregation == "constant-length"
    return loss_normaliser(mask, config.aggregation, max_length=MAX_LENGTH if constant else None)


# --- By hand ---


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


# --- A policy with parameters ---


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
