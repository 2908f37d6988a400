"""Group advantages against hand-computed numbers."""

import jax.numpy as jnp
import numpy as np
import pytest
from grpo_cases import f32

from train.advantages import group_advantages, informative


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


def test_rows_that_are_not_learned_do_not_move_the_deviation_of_the_batch():
    rewards = jnp.asarray([0.0, 1.0, 2.0, 0.0, 9.0, 9.0])
    learned = jnp.asarray([True] * 4 + [False] * 2)
    got = group_advantages(rewards, 2, std="batch", learned=learned)
    np.testing.assert_array_equal(got[:4], group_advantages(rewards[:4], 2, std="batch"))
    np.testing.assert_array_equal(got[4:], 0.0)
    none = group_advantages(rewards, 2, std="batch", learned=jnp.zeros(6, bool))
    assert np.isfinite(none).all()
