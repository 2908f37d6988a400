"""The learner: one optimiser step of GRPO, or of supervised learning, as one compiled function.

    weights (quantised once) -> scan over micro-batches: forward, loss share, fp32 gradients added
    -> clip, AdamW -> new parameters -> quantise them once

The state is donated: the old parameters' memory becomes the new ones'. Loss normalisers are those
of the whole batch, so losses and gradients of the pieces add up however the batch is cut; a last
piece that is not full is filled with rows of padding.

A step whose loss or gradient is not finite, or whose gradient is exactly zero (every group of
equal rewards, nothing in the mask), changes nothing: no parameter, no moment, no count of the
optimiser. It is counted in `TrainState.skipped`.

Left out: more than one device, and gradients held in less than fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from train.config import Optimizer
from train.diagnostics import gap_metrics, policy_metrics
from train.grpo import LossConfig, loss_normaliser, policy_loss
from train.rollout import Rollout
from train.weights import Weights, prepare


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What an optimiser step reads and replaces.

    weights: parameters and their prepared form.
    optimizer: optax's state, moments in fp32.
    steps: i32[], optimiser steps taken.
    skipped: i32[], steps that were refused.
    """

    weights: Weights
    optimizer: Any
    steps: jax.Array
    skipped: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """What a GRPO step learns from. Shapes are those of the rollout, [N] and [N, T].

    rollout: tokens, and the sampler's log-probs.
    advantages: f32[N].
    learned: bool[N], the rows that the loss is over; the others (groups of equal rewards) count
      neither above nor below the fraction bar.
    old_logprob: f32[N, T] of the policy at the start of the update; None on the first inner step:
      the step's own log-probs, with a ratio of exactly 1.
    reference_logprob: f32[N, T] of the reference policy; None without one.
    """

    rollout: Rollout
    advantages: jax.Array
    learned: jax.Array
    old_logprob: jax.Array | None = None
    reference_logprob: jax.Array | None = None

    @property
    def mask(self) -> jax.Array:
        """The tokens that the loss is over, bool[N, T]."""
        return self.rollout.mask & self.learned[:, None]


@dataclass(frozen=True)
class Learner:
    """Compiled steps with fixed settings; calls of equal shapes share one program.

    Attributes:
      graphdef: of the model, `nnx.split(model, nnx.Param)[0]`.
      optimizer: learning rate, clipping and so on.
      loss: what is optimised.
      temperature: of the sampler; logits are divided by it before every log-prob.
      max_new_tokens: R, the last slots of a row, which hold its completion.
      micro_batch: rows of one forward and backward pass.
    """

    graphdef: nnx.GraphDef
    optimizer: Optimizer
    loss: LossConfig
    temperature: float
    max_new_tokens: int
    micro_batch: int

    def init(self, params: Any) -> TrainState:
        """The state before the first step. Takes the parameters over: `update` donates them."""
        return TrainState(
            weights=prepare(params, graphdef=self.graphdef),
            optimizer=jax.jit(make_optimizer(self.optimizer).init)(params),
            steps=jnp.int32(0),
            skipped=jnp.int32(0),
        )

    def update(
        self, state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
        """One optimiser step of GRPO; `state` is donated.

        Returns:
          The next state; metrics as named in metrics.py, the gap between sampler and learner
          included (meaningful on the first inner step); and the log-probs f32[N, T] before the
          step, which are the later inner steps' `old_logprob`.
        """
        return _update(state, batch, learner=self)

    def supervised_update(
        self, state: TrainState, rollout: Rollout
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimiser step on the mean negative log-likelihood of the masked tokens."""
        return _supervised_update(state, rollout, learner=self)

    def score(self, weights: Weights, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies f32[N, T] of the sampled tokens, 0 outside the mask."""
        return _score(weights, rollout, learner=self)


def make_optimizer(config: Optimizer) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019) with clipping by global norm and a linear warm-up.

    Weight decay leaves out norm weights and biases.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=_is_matrix,
        ),
    )


def learning_rate(config: Optimizer) -> optax.Schedule:
    """From the number of steps taken to the step size."""

    def rate(steps: jax.typing.ArrayLike) -> jax.Array:
        share = (jnp.asarray(steps, jnp.float32) + 1.0) / (config.warmup_steps + 1.0)
        return config.learning_rate * jnp.minimum(share, 1.0)

    return rate


def _is_matrix(params: Any) -> Any:
    """Which parameters decay: by name, because stacked norms have two axes as well."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(part in jax.tree_util.keystr(path) for part in ("norm", "bias")),
        params,
    )


def _completion_logprob(
    weights: Weights, rollout: Rollout, learner: Learner
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies f32[n, T] of the sampled tokens of a few rows."""
    model = nnx.merge(learner.graphdef, weights.params)
    out = model(rollout.tokens, start=rollout.start, end=rollout.end, prepared=weights.prepared)
    first = rollout.tokens.shape[1] - learner.max_new_tokens
    values = model.token_logprob(
        out.hidden[:, first - 1 : -1],
        rollout.tokens[:, first:],
        temperature=learner.temperature,
    )
    mask = rollout.mask[:, first:]
    padding = ((0, 0), (first, 0))
    logprob, entropy = (jnp.pad(jnp.where(mask, v, 0.0), padding) for v in values)
    return logprob, entropy


def _pieces(rows: Any, size: int) -> Any:
    """Arrays [N, ...] cut into [ceil(N / size), size, ...], filled up with zeros: a row that
    starts at 0 and ends at 0 is padding as a whole."""

    def cut(leaf: jax.Array) -> jax.Array:
        missing = -leaf.shape[0] % size
        leaf = jnp.pad(leaf, [(0, missing)] + [(0, 0)] * (leaf.ndim - 1))
        return leaf.reshape(-1, size, *leaf.shape[1:])

    return jax.tree.map(cut, rows)


def _whole(pieces: Any, rows: int) -> Any:
    """The inverse of `_pieces`."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:rows], pieces)


@partial(jax.jit, static_argnames="learner")
def _score(weights: Weights, rollout: Rollout, *, learner: Learner) -> tuple[jax.Array, jax.Array]:
    def piece(rows: Rollout) -> tuple[jax.Array, jax.Array]:
        return _completion_logprob(weights, rows, learner)

    size = min(learner.micro_batch, rollout.tokens.shape[0])
    return _whole(lax.map(piece, _pieces(rollout, size)), rollout.tokens.shape[0])


def _gradients(
    weights: Weights,
    batch: Any,
    rows: int,
    learner: Learner,
    share: Callable[[Any, jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, Any, jax.Array, jax.Array]:
    """Loss, fp32 gradients, log-probs and entropies [N, T] of a batch, a micro-batch at a time.

    `share(piece, logprob, entropy)` is a piece's share of the loss; `batch` is a Rollout or Batch.
    """

    def loss(params: Any, piece: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        rollout = piece if isinstance(piece, Rollout) else piece.rollout
        current = Weights(params, weights.prepared)
        logprob, entropy = _completion_logprob(current, rollout, learner)
        return share(piece, logprob, entropy), (logprob, entropy)

    def accumulate(total: tuple, piece: Any) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        (value, seen), gradient = jax.value_and_grad(loss, has_aux=True)(weights.params, piece)
        value = (total[0] + value, jax.tree.map(jnp.add, total[1], gradient))
        return value, seen

    zero = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), weights.params)
    pieces = _pieces(batch, min(learner.micro_batch, rows))
    (value, gradients), seen = lax.scan(accumulate, (jnp.float32(0.0), zero), pieces)
    return value, gradients, *_whole(seen, rows)


def _apply(
    state: TrainState, loss: jax.Array, gradients: Any, learner: Learner
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The optimiser step, or none of it."""
    norm = optax.tree.norm(gradients)
    taken = jnp.isfinite(loss) & jnp.isfinite(norm) & (norm > 0.0)
    params = state.weights.params
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
        updates, optimizer = make_optimizer(learner.optimizer).update(
            gradients, state.optimizer, params
        )
    updated = optax.apply_updates(params, updates)
    params, optimizer = jax.tree.map(
        lambda new, old: jnp.where(taken, new, old),
        (updated, optimizer),
        (params, state.optimizer),
    )
    skipped = state.skipped + (~taken).astype(jnp.int32)
    next_state = TrainState(
        weights=Weights(params, nnx.merge(learner.graphdef, params).prepare()),
        optimizer=optimizer,
        steps=state.steps + taken.astype(jnp.int32),
        skipped=skipped,
    )
    metrics = {
        "policy/loss": loss,
        "optimizer/gradient_norm": norm,
        "optimizer/learning_rate": learning_rate(learner.optimizer)(state.steps),
        "optimizer/skipped": skipped.astype(jnp.float32),
    }
    return next_state, metrics


@partial(jax.jit, static_argnames="learner", donate_argnums=0)
def _update(
    state: TrainState, batch: Batch, *, learner: Learner
) -> tuple[TrainState, dict[str, jax.Array], jax.Array]:
    rollout, config = batch.rollout, learner.loss
    constant = learner.max_new_tokens if config.aggregation == "constant-length" else None
    normaliser = loss_normaliser(batch.mask, config.aggregation, max_length=constant)

    def share(piece: Batch, logprob: jax.Array, entropy: jax.Array) -> jax.Array:
        old = piece.old_logprob
        return policy_loss(
            logprob,
            old_logprob=lax.stop_gradient(logprob) if old is None else old,
            advantages=piece.advantages,
            mask=piece.mask,
            normaliser=normaliser,
            config=config,
            sampler_logprob=piece.rollout.logprob,
            reference_logprob=piece.reference_logprob,
            entropy=entropy,
        )

    rows = rollout.tokens.shape[0]
    loss, gradients, logprob, entropy = _gradients(state.weights, batch, rows, learner, share)
    state, metrics = _apply(state, loss, gradients, learner)
    metrics |= gap_metrics(rollout.logprob, logprob, rollout.mask)
    metrics |= policy_metrics(
        logprob,
        old_logprob=logprob if batch.old_logprob is None else batch.old_logprob,
        advantages=batch.advantages,
        mask=batch.mask,
        entropy=entropy,
        config=config,
        sampler_logprob=rollout.logprob,
        reference_logprob=batch.reference_logprob,
    )
    return state, metrics, logprob


@partial(jax.jit, static_argnames="learner", donate_argnums=0)
def _supervised_update(
    state: TrainState, rollout: Rollout, *, learner: Learner
) -> tuple[TrainState, dict[str, jax.Array]]:
    normaliser = loss_normaliser(rollout.mask, "token-mean")

    def share(piece: Rollout, logprob: jax.Array, entropy: jax.Array) -> jax.Array:
        del entropy
        return -jnp.where(piece.mask, logprob, 0.0).sum() / normaliser

    rows = rollout.tokens.shape[0]
    loss, gradients, *_ = _gradients(state.weights, rollout, rows, learner, share)
    return _apply(state, loss, gradients, learner)
