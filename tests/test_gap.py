"""Sampler and learner compute the same log-probs, bit for bit.

Each case samples with padded prompts and scores the completions without a gradient, and inside a
step with gradient and rematerialisation, in other batch sizes and another order.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from policies import keys, learner, prompts, sampler, split, weights

from train.learner import Batch
from train.rollout import concatenate

LENGTHS = {1: [5], 8: [5, 1, 3, 7, 7, 2, 6, 4], 64: [1 + i * 5 % 7 for i in range(64)]}


@pytest.mark.parametrize(
    ("kind", "recipe", "temperature", "batches"),
    [
        ("moe", "nvfp4", 1.0, (1, 8, 64)),
        ("moe", "nvfp4", 0.6, (8,)),
        ("moe", "bf16", 0.6, (1, 8, 64)),
        ("dense", "nvfp4", 0.6, (1, 8, 64)),
        ("dense", "bf16", 1.0, (1, 8, 64)),
    ],
)
def test_gap_is_zero(kind, recipe, temperature, batches):
    policy = weights(kind, recipe)
    # The stop tokens cut some rows early.
    draw = sampler(kind, recipe, temperature=temperature, stop_ids=(3, 4))
    rollout = concatenate(
        [draw(policy, *prompts(LENGTHS[n], slots=7), keys(range(n))) for n in batches]
    )
    assert (np.asarray(rollout.logprob)[np.asarray(rollout.mask)] < 0).all()

    settings = {"temperature": temperature, "micro_batch": 8}
    scored, entropy = learner(kind, recipe, **settings).score(policy, rollout)
    np.testing.assert_array_equal(scored, rollout.logprob)
    assert (np.asarray(entropy)[np.asarray(rollout.mask)] > 0).all()

    trainer = learner(kind, recipe, remat="block", **settings)
    state = trainer.init(policy.params)
    rows = sum(batches)
    reverse = rollout.rows(np.arange(rows)[::-1])
    step = Batch(reverse, jnp.linspace(-1, 1, rows), jnp.ones(rows, bool), reverse.logprob)
    _, metrics, logprob = trainer.update(state, step)
    np.testing.assert_array_equal(logprob, reverse.logprob)
    for name in ("gap/mean_abs", "gap/max_abs", "gap/k3"):
        assert metrics[name] == 0.0
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["optimizer/gradient_norm"] > 0


def test_log_probs_do_not_depend_on_the_micro_batch():
    """Micro-batches of 1, 2, 3 and 8 rows, the last of them not full."""
    policy = weights()
    rollout = sampler()(policy, *prompts(LENGTHS[8]), keys(range(8)))
    for micro_batch in (1, 2, 3, 8):
        logprob, entropy = learner(micro_batch=micro_batch).score(policy, rollout)
        np.testing.assert_array_equal(logprob, rollout.logprob)
        if micro_batch == 1:
            first = entropy
        np.testing.assert_array_equal(entropy, first)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.5])
def test_temperature_divides_the_logits_once(temperature):
    """Against log_softmax(logits / temperature) of the model's logits, in fp64."""
    policy = weights()
    rollout = sampler(temperature=temperature)(policy, *prompts([4, 2]), keys(range(2)))
    model = nnx.merge(split("moe", "nvfp4")[0], policy.params)
    hidden = jax.jit(lambda r: model(r.tokens, start=r.start, end=r.end).hidden)(rollout)
    logits = np.asarray(model.logits(hidden), np.float64) / temperature
    logits -= logits.max(axis=-1, keepdims=True)
    every = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = np.take_along_axis(every[:, :-1], np.asarray(rollout.tokens)[:, 1:, None], -1)
    mask = np.asarray(rollout.mask)[:, 1:]
    found = np.asarray(rollout.logprob)[:, 1:]
    np.testing.assert_allclose(found[mask], expected[..., 0][mask], atol=2e-6)
