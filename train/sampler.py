"""The in-process sampler: completions from the policy, with the log-probs they were drawn with.

One compiled program prefills the prompts and decodes in a loop that ends when every row has
stopped. It runs the learner's model on the learner's prepared weights, and every operation that
sums along a row keeps its order, so at top_p = 1 and top_k off the log-probs are the learner's bit
for bit.

**A request draws from its own key.** Token t of a request is drawn with
fold_in(fold_in(fold_in(key, step), request), t) and the Gumbel trick (the argmax of
logits / temperature + Gumbel noise is a draw from the softmax), so neither the other rows of the
batch nor its order or padding change a token.

Truncation by top_k and top_p draws from another distribution than the learner's, and the returned
log-probs are those of that distribution. At temperature 0 the most likely token is taken (ties to
the lowest id) and its log-prob is the policy's at temperature 1.

Left out: continuous batching, a cache of prompt prefixes across calls (it would outlive the
weights it was computed with), beam search, stop strings.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jaxfp4
from train.config import Sampling
from train.rollout import Rollout
from train.weights import Weights


def request_keys(key: jax.Array, step: int, requests: np.ndarray) -> jax.Array:
    """One key for each request: key[N] from the run's key, the step and the ids i32[N]."""
    at_step = jax.random.fold_in(key, step)
    return jax.vmap(partial(jax.random.fold_in, at_step))(jnp.asarray(requests, jnp.uint32))


@dataclass(frozen=True)
class Sampler:
    """Samples completions with fixed settings; calls of equal shapes share one program.

    Attributes:
      graphdef: of the model, `nnx.split(model, nnx.Param)[0]`.
      sampling: lengths and how tokens are drawn.
      stop_ids: drawing one of these ends a completion.
      pad_id: what fills the slots after it.
    """

    graphdef: nnx.GraphDef
    sampling: Sampling
    stop_ids: tuple[int, ...]
    pad_id: int

    def __call__(
        self,
        weights: Weights,
        tokens: np.ndarray,
        start: np.ndarray,
        keys: jax.Array,
        group_size: int = 1,
    ) -> Rollout:
        """Samples `group_size` completions of each prompt.

        Args:
          weights: parameters and their prepared form.
          tokens: i32[B, P], prompts that end at slot P, padded on the left.
          start: i32[B], slot of the first real token, 0 <= start < P.
          keys: key[B * group_size], one for each completion (`request_keys`).
          group_size: completions of a prompt; they share its prefill.

        Returns:
          A Rollout of B * group_size rows without rewards.
        """
        if not ((np.asarray(start) >= 0) & (np.asarray(start) < tokens.shape[1])).all():
            raise ValueError(f"start={start}: each must be from 0 to {tokens.shape[1] - 1}")
        if keys.shape != (tokens.shape[0] * group_size,):
            raise ValueError(
                f"keys has shape {keys.shape}: {tokens.shape[0]} prompts with group_size="
                f"{group_size} need ({tokens.shape[0] * group_size},)"
            )
        # Stop tokens are an argument of the program, so changing them compiles nothing.
        return _generate(
            weights,
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(start, jnp.int32),
            keys,
            jnp.asarray(self.stop_ids, jnp.int32),
            jnp.int32(self.pad_id),
            graphdef=self.graphdef,
            sampling=self.sampling,
            group=group_size,
        )


class _Loop(NamedTuple):
    """State of decoding: t tokens of each row were drawn; `end` and `finished` as in Rollout."""

    t: jax.Array
    tokens: jax.Array
    logprob: jax.Array
    end: jax.Array
    finished: jax.Array
    cache: object


@partial(jax.jit, static_argnames=("graphdef", "sampling", "group"))
def _generate(
    weights: Weights,
    tokens_BP: jax.Array,
    start_B: jax.Array,
    keys_N: jax.Array,
    stop_ids: jax.Array,
    pad_id: jax.Array,
    *,
    graphdef: nnx.GraphDef,
    sampling: Sampling,
    group: int,
) -> Rollout:
    model = nnx.merge(graphdef, weights.params)
    batch, prompt = tokens_BP.shape
    limit = sampling.max_new_tokens
    rows = batch * group

    out = model(
        tokens_BP,
        start=start_B,
        end=jnp.full(batch, prompt, jnp.int32),
        prepared=weights.prepared,
        # The last token that is drawn is never fed back, so it needs no slot.
        cache=model.init_cache(batch, prompt + limit - 1),
    )
    start_N = jnp.repeat(start_B, group)
    padding = jnp.full((rows, limit), pad_id)

    def draw(state: _Loop, hidden_NH: jax.Array) -> _Loop:
        """Draws token t of every row that has not stopped."""
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys_N, state.t)
        token, logprob = draw_tokens(model.logits(hidden_NH), keys, sampling)
        running = ~state.finished
        slot = prompt + state.t
        column = (slice(None), slot)
        return _Loop(
            t=state.t + 1,
            tokens=state.tokens.at[column].set(jnp.where(running, token, pad_id)),
            logprob=state.logprob.at[column].set(jnp.where(running, logprob, 0.0)),
            end=jnp.where(running, slot + 1, state.end),
            finished=state.finished | jnp.isin(token, stop_ids),
            cache=state.cache,
        )

    def decode(state: _Loop) -> _Loop:
        """Feeds the newest token of every row, then draws the next one."""
        slot = prompt + state.t - 1
        out = model(
            lax.dynamic_slice_in_dim(state.tokens, slot, 1, axis=1),
            start=start_N,
            # To a row that has stopped this slot is padding.
            end=jnp.where(state.finished, jnp.minimum(state.end, slot), state.end),
            prepared=weights.prepared,
            cache=state.cache,
            offset=jnp.full(rows, slot, jnp.int32),
        )
        return draw(state._replace(cache=out.cache), out.hidden[:, 0])

    state = _Loop(
        t=jnp.int32(0),
        tokens=jnp.concatenate([jnp.repeat(tokens_BP, group, axis=0), padding], axis=1),
        logprob=jnp.zeros((rows, prompt + limit), jnp.float32),
        end=jnp.full(rows, prompt, jnp.int32),
        finished=jnp.zeros(rows, bool),
        cache=jax.tree.map(lambda leaf: jnp.repeat(leaf, group, axis=1), out.cache),
    )
    state = draw(state, jnp.repeat(out.hidden[:, -1], group, axis=0))
    state = lax.while_loop(lambda s: (s.t < limit) & ~s.finished.all(), decode, state)

    slots = jnp.arange(prompt + limit)
    return Rollout(
        tokens=state.tokens,
        start=start_N,
        end=state.end,
        logprob=state.logprob,
        mask=(slots >= prompt) & (slots < state.end[:, None]),
        finished=state.finished,
        rewards=jnp.zeros(rows, jnp.float32),
    )


def draw_tokens(
    logits_NV: jax.Array, keys_N: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Draws one token a row: ids i32[N] and their log-probs f32[N] (see the module's text)."""
    if sampling.temperature == 0.0:
        token = jnp.argmax(logits_NV, axis=-1).astype(jnp.int32)
        return token, jaxfp4.logits_logprob(logits_NV, token)[0]
    scaled = logits_NV / sampling.temperature
    if sampling.truncates:
        kept = _kept(scaled, sampling)
        logits_NV, scaled = (jnp.where(kept, x, -jnp.inf) for x in (logits_NV, scaled))
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits_NV.shape[1:]))(keys_N)
    token = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
    return token, jaxfp4.logits_logprob(logits_NV, token, temperature=sampling.temperature)[0]


def _kept(scaled_NV: jax.Array, sampling: Sampling) -> jax.Array:
    """The tokens that may be drawn, bool[N, V]: the top_k most likely, and of the distribution
    over these the fewest most likely ones that have a probability of top_p together."""
    order = jnp.argsort(-scaled_NV, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    kept = rank < (sampling.top_k or scaled_NV.shape[-1])
    if sampling.top_p < 1.0:
        highest = scaled_NV.max(axis=-1, keepdims=True)
        mass = jnp.where(kept, jnp.exp(scaled_NV - highest), 0.0)
        # A tree of additions: its order, and so the set, does not depend on the batch.
        ordered = jnp.take_along_axis(mass, order, axis=-1)
        until = lax.associative_scan(jnp.add, ordered, axis=-1)
        before = jnp.concatenate([jnp.zeros_like(until[:, :1]), until[:, :-1]], axis=-1)
        enough = before >= sampling.top_p * until[:, -1:]
        kept &= ~jnp.take_along_axis(enough, rank, axis=-1)
    return kept
