"""Gap, policy and rollout metrics against hand-computed numbers."""

import jax.numpy as jnp
import numpy as np
from grpo_cases import ADVANTAGES, MASK, RATIOS, f32

from train.diagnostics import gap_metrics, policy_metrics, rollout_metrics
from train.grpo import LossConfig


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
    graded, shaped = f32([1, 1, 0, 2]), f32([1, 1, 0, 1.5])
    got = rollout_metrics(graded, shaped, mask, jnp.array([True, True, True, False]), 2)
    expected = {
        "reward/mean": 1.0,
        "reward/std": np.sqrt(0.5),
        "reward/min": 0.0,
        "reward/max": 2.0,
        "reward/shaped_mean": 0.875,
        "reward/zero_variance": 0.5,
        "length/mean": 4.0,
        "length/min": 2.0,
        "length/max": 6.0,
        "length/truncated": 0.25,
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)
