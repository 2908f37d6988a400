"""Advantages of completions relative to their group (the completions of one prompt).

    A_i = (r_i - mean of its group) / s

where s is the standard deviation of its group (GRPO: Shao et al., "DeepSeekMath", 2024), of the
whole batch (Liu et al., "Tricks or traps? A deep dive into RL for LLM reasoning", 2025) or 1
(Dr. GRPO: Liu et al., "Understanding R1-Zero-like training", 2025). Standard deviations are the
sample ones (divided by n - 1).

A group whose rewards are all equal says nothing: its advantages are exactly 0, whatever rounding
the mean suffered. A group of one is such a group. `informative` finds the others, for dynamic
sampling (DAPO: Yu et al., 2025); drawing replacements is not done here.

Rows of one prompt are adjacent: row = prompt * group_size + sample.
"""

from typing import Literal

import jax
import jax.numpy as jnp

AdvantageStd = Literal["group", "batch", "none"]

# Keeps the noise in the last bit of nearly equal rewards from being blown up to advantages of 1.
STD_FLOOR = 1e-6


def _groups(rewards: jax.Array, group_size: int) -> jax.Array:
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: must be at least 1")
    if rewards.ndim != 1 or rewards.shape[0] % group_size:
        raise ValueError(
            f"rewards has shape {rewards.shape}: expected [N] with N a multiple of "
            f"group_size={group_size}"
        )
    return rewards.reshape(-1, group_size)


def informative(rewards: jax.Array, group_size: int) -> jax.Array:
    """Which rows belong to a group whose rewards differ.

    Args:
      rewards: f32[N], the task's rewards (before any KL penalty, which always differs).
      group_size: completions per prompt.

    Returns:
      bool[N]; `.reshape(-1, group_size)[:, 0]` has one value per prompt.
    """
    groups = _groups(rewards, group_size)
    return jnp.repeat(groups.max(axis=1) != groups.min(axis=1), group_size)


def group_advantages(
    rewards: jax.Array,
    group_size: int,
    *,
    std: AdvantageStd = "group",
    learned: jax.Array | None = None,
) -> jax.Array:
    """Advantage of each completion relative to its group.

    Args:
      rewards: f32[N], finite.
      group_size: completions per prompt; N is a multiple of it.
      std: "group", "batch" or "none": which standard deviation divides.
      learned: bool[N], the rows that the batch's deviation is over; None: all of them.

    Returns:
      f32[N]; exactly 0 in groups whose rewards are all equal.

    Raises:
      ValueError: on a shape or an option that is not legal.
    """
    groups = _groups(rewards, group_size)
    centred = groups - groups.mean(axis=1, keepdims=True)
    match std:
        case "group":
            spread = jnp.sqrt(
                jnp.square(centred).sum(axis=1, keepdims=True) / max(group_size - 1, 1)
            )
        case "batch":
            rows = jnp.ones_like(groups) if learned is None else learned.reshape(groups.shape)
            rows = rows.astype(jnp.float32)
            count = rows.sum()
            deviation = rows * (groups - (rows * groups).sum() / jnp.maximum(count, 1.0))
            spread = jnp.sqrt(jnp.square(deviation).sum() / jnp.maximum(count - 1.0, 1.0))
        case "none":
            spread = None
        case _:
            raise ValueError(f"std={std!r}: legal values are 'group', 'batch', 'none'")
    scaled = centred if spread is None else centred / (spread + STD_FLOOR)
    return jnp.where(informative(rewards, group_size), scaled.reshape(-1), 0.0)
