"""The in-process sampler: completions from the policy, with the log-probs they were drawn with.

One compiled program prefills the prompts and decodes in a loop that ends when every row has
stopped. It runs the learner's model on the learner's prepared weights, and every operation that
sums along a row keeps its order, so at top_p = 1 and top_k off the log-probs are the learner's bit
for bit.

**A request draws from its own key.** Token t of a request is drawn with
fold_in(fold_in(fold_in(key, step), request), t) and the Gumbel trick (the argmax of
logits / temperature + Gumbel noise is a draw from the softmax), so neither the other rows of the
batch nor its order or padding change a token; a rollout is drawn in pieces of
`sampling.micro_batch` rows where the caches of all of them would not fit into memory.

Truncation by top_k and top_p draws from another distribution than the learner's, and the returned
log-probs are those of that distribution. At temperature 0 the most likely token is taken (ties to
the lowest id) and its log-prob is the policy's at temperature 1.

Left out: continuous batching, a cache of prompt prefixes across calls (it would outlive the
weights it was computed with), beam search, stop strings.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import jaxfp4
from models import Cache, Qwen3
from train.config import Sampling
from train.rollout import Rollout, concatenate
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
        prompts = tokens.shape[0]
        at_once = prompts
        if self.sampling.micro_batch is not None:
            at_once = min(prompts, max(1, self.sampling.micro_batch // group_size))
        pieces = []
        for first in range(0, prompts, at_once):
            # The last piece is filled up: another size would be another program.
            chosen = np.minimum(np.arange(first, first + at_once), prompts - 1)
            rows = chosen[:, None] * group_size + np.arange(group_size)
            piece = _generate(
                weights,
                jnp.asarray(tokens[chosen], jnp.int32),
                jnp.asarray(start[chosen], jnp.int32),
                keys[rows.reshape(-1)],
                # An argument of the program, so that other stop tokens compile nothing.
                jnp.asarray(self.stop_ids, jnp.int32),
                jnp.int32(self.pad_id),
                graphdef=self.graphdef,
                sampling=self.sampling,
                group=group_size,
            )
            pieces.append(piece)
        if len(pieces) == 1:
            return pieces[0]
        return concatenate(pieces).rows(np.arange(prompts * group_size))


class _Loop(NamedTuple):
    """State of decoding: t tokens of each row were drawn; `end` and `finished` as in Rollout."""

    t: jax.Array
    tokens: jax.Array
    logprob: jax.Array
    end: jax.Array
    finished: jax.Array
    cache: Cache


class _Requests(NamedTuple):
    """What stays the same while decoding. prompt: slots of the prompts, P."""

    model: Qwen3
    prepared: Any
    start: jax.Array
    keys: jax.Array
    stop_ids: jax.Array
    pad_id: jax.Array
    prompt: int
    sampling: Sampling


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
    requests = _Requests(
        model, weights.prepared, start_N, keys_N, stop_ids, pad_id, prompt, sampling
    )
    padding = jnp.full((rows, limit), pad_id)
    state = _Loop(
        t=jnp.int32(0),
        tokens=jnp.concatenate([jnp.repeat(tokens_BP, group, axis=0), padding], axis=1),
        logprob=jnp.zeros((rows, prompt + limit), jnp.float32),
        end=jnp.full(rows, prompt, jnp.int32),
        finished=jnp.zeros(rows, bool),
        cache=jax.tree.map(lambda leaf: jnp.repeat(leaf, group, axis=1), out.cache),
    )
    state = _draw(requests, state, jnp.repeat(out.hidden[:, -1], group, axis=0))
    state = lax.while_loop(
        lambda s: (s.t < limit) & ~s.finished.all(), partial(_decode, requests), state
    )
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


def _draw(requests: _Requests, state: _Loop, hidden_NH: jax.Array) -> _Loop:
    """Draws token t of every row that has not stopped."""
    keys = jax.vmap(jax.random.fold_in, (0, None))(requests.keys, state.t)
    token, logprob = draw_tokens(requests.model.logits(hidden_NH), keys, requests.sampling)
    running = ~state.finished
    slot = requests.prompt + state.t
    column = (slice(None), slot)
    return _Loop(
        t=state.t + 1,
        tokens=state.tokens.at[column].set(jnp.where(running, token, requests.pad_id)),
        logprob=state.logprob.at[column].set(jnp.where(running, logprob, 0.0)),
        end=jnp.where(running, slot + 1, state.end),
        finished=state.finished | jnp.isin(token, requests.stop_ids),
        cache=state.cache,
    )


def _decode(requests: _Requests, state: _Loop) -> _Loop:
    """Feeds the newest token of every row, then draws the next one."""
    slot = requests.prompt + state.t - 1
    out = requests.model(
        lax.dynamic_slice_in_dim(state.tokens, slot, 1, axis=1),
        start=requests.start,
        # To a row that has stopped this slot is padding.
        end=jnp.where(state.finished, jnp.minimum(state.end, slot), state.end),
        prepared=requests.prepared,
        cache=state.cache,
        offset=slot,
    )
    return _draw(requests, state._replace(cache=out.cache), out.hidden[:, 0])


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
