"""A batch of prompts with their completions: what the sampler returns and the learner takes.

N rows of T = P + R slots: the prompt ends at slot P (padded on its left), the completion starts
there and has at most R tokens (padded on its right). Rows of one prompt are adjacent:
row = prompt * group_size + sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollout:
    """Completions by row. Which slots are real is said by start, end and mask, never by token ids.

    tokens: i32[N, T].
    start: i32[N], slot of the first real prompt token.
    end: i32[N], one past the last real token, the stop token included.
    logprob: f32[N, T], log-prob of tokens[:, t] under the distribution that it was sampled from;
      0 outside the mask.
    mask: bool[N, T], the sampled tokens: P <= t < end. The loss is over these.
    finished: bool[N], the last token is a stop token; otherwise the length limit cut the row.
    rewards: f32[N], what is learned from; 0 until graded.
    """

    tokens: jax.Array
    start: jax.Array
    end: jax.Array
    logprob: jax.Array
    mask: jax.Array
    finished: jax.Array
    rewards: jax.Array

    def completions(self) -> list[list[int]]:
        """The sampled token ids of each row, the stop token included."""
        tokens, mask = np.asarray(self.tokens), np.asarray(self.mask)
        return [row[real].tolist() for row, real in zip(tokens, mask, strict=True)]

    def rows(self, index: jax.Array | np.ndarray) -> "Rollout":
        """The rows `index` i32[M], in that order."""
        return jax.tree.map(lambda leaf: leaf[index], self)


def concatenate(rollouts: Sequence[Rollout]) -> Rollout:
    """The rows of all rollouts, in order; all have the same number of slots."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rollouts)


def left_pad(
    prompts: Sequence[Sequence[int]], slots: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as arrays: tokens i32[B, slots] that end at the last slot, and their start i32[B].

    Raises:
      ValueError: a prompt is empty or longer than `slots`.
    """
    tokens = np.full((len(prompts), slots), pad_id, np.int32)
    start = np.zeros(len(prompts), np.int32)
    for row, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= slots:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens; between 1 and {slots} are legal"
            )
        start[row] = slots - len(prompt)
        tokens[row, start[row] :] = prompt
    return tokens, start
