"""Routing of tokens to experts: the router's choice, and the sum of the chosen experts' outputs.

Both are custom calls with a fixed order (ffi/numerics.h): a token's experts, weights and sum depend
on that token alone, whatever the batch. Their derivatives are deterministic.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfp4.batching import batching_rule, first_rows, fold, over_rows, unfold
from jaxfp4.checks import check_array, check_float
from jaxfp4.custom_calls import absent, call, match_varying


def router_topk(
    logits: jax.Array, k: int, *, norm_topk_prob: bool, experts: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Each token's k experts and their weights: the largest of softmax(logits).

    Args:
      logits: fp32 [..., E].
      k: number of experts for each token, 1 <= k <= E.
      norm_topk_prob: divide the k weights by their sum (added in rank order).
      experts: int32 [..., k]: a recorded choice to replay, in its rank order. An index outside
        [0, E) has weight 0.

    Returns:
      weights fp32 [..., k], largest first, and experts int32 [..., k]. Ties go to the lowest
      index. A token whose logits hold NaN has NaN weights and the experts 0 to k - 1. Gradients
      flow through the weights to the logits.
    """
    if logits.ndim < 1:
        raise ValueError(f"logits must have an axis of experts, got shape {logits.shape}")
    check_array("logits", logits, logits.shape, jnp.float32)
    num_experts = logits.shape[-1]
    if not 1 <= k <= num_experts:
        raise ValueError(f"k must be between 1 and the {num_experts} experts of logits, got {k}")
    lead = logits.shape[:-1]
    rows = math.prod(lead)
    if experts is not None:
        check_array("experts", experts, (*lead, k), jnp.int32)
    results: tuple[jax.Array, jax.Array] = _router_topk(
        *match_varying(
            logits.reshape(rows, num_experts),
            absent(jnp.int32) if experts is None else experts.reshape(rows, k),
        ),
        k,
        bool(norm_topk_prob),
    )
    weights, chosen = results
    return weights.reshape(*lead, k), chosen.reshape(*lead, k)


@functools.cache
def _router_topk_call(k: int, norm_topk_prob: bool, replay: bool) -> Any:
    def run(logits, experts):
        results = [((logits.shape[0], k), jnp.float32), ((logits.shape[0], k), jnp.int32)]
        return tuple(call("router_topk", results, logits, experts, norm_topk_prob=norm_topk_prob))

    return over_rows(run, shared=() if replay else (1,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _router_topk(logits, experts, k, norm_topk_prob):
    return _router_topk_call(k, norm_topk_prob, experts.ndim == 2)(logits, experts)


def _router_topk_fwd(logits, experts, k, norm_topk_prob):
    results: tuple[jax.Array, jax.Array] = _router_topk(logits, experts, k, norm_topk_prob)
    return results, (logits, *results)


def _router_topk_bwd(k, norm_topk_prob, residuals, cotangents):
    logits, weights, chosen = residuals
    weighted = weights * cotangents[0]
    total = weighted.sum(axis=-1, keepdims=True)
    # The weights are a softmax over the chosen experts, or a part of the one over all.
    at_chosen = weighted - weights * total if norm_topk_prob else weighted
    is_chosen = chosen[..., None] == jnp.arange(logits.shape[-1], dtype=jnp.int32)
    dlogits = jnp.where(is_chosen, at_chosen[..., None], 0).sum(axis=-2)
    if not norm_topk_prob:
        dlogits -= jax.nn.softmax(logits, axis=-1) * total
    return dlogits, None


_router_topk.defvjp(_router_topk_fwd, _router_topk_bwd)


# --- Combining the experts' outputs ---


def combine_experts(y: jax.Array, weights: jax.Array, slots: jax.Array) -> jax.Array:
    """Each token's weighted sum over its experts: sum_j weights[m, j] * y[slots[m, j]].

    j ascends, in fp32, rounded once.

    Args:
      y: bf16 or fp32 [R, H], the experts' outputs in the order in which they were computed.
      weights: fp32 [M, k].
      slots: int32 [M, k], rows of y. A slot outside [0, R) adds nothing and gets no gradient.

    Returns:
      [M, H] in y's dtype.
    """
    check_float("y", y)
    if y.ndim != 2 or weights.ndim != 2:
        raise ValueError(
            f"y must be [R, H] and weights [M, k], got shapes {y.shape} and {weights.shape}"
        )
    check_array("weights", weights, weights.shape, jnp.float32)
    check_array("slots", slots, weights.shape, jnp.int32)
    return _combine_experts(*match_varying(y, weights, slots))


def _fold_slots(size, batched, operands):
    """y, weights, slots and more with the batch folded into rows, slots moved to their rows."""
    y_rows = operands[0].shape[1 if batched[0] else 0]
    slots = operands[2] if batched[2] else jnp.broadcast_to(operands[2], (size, *operands[2].shape))
    first = first_rows(size, y_rows)[:, None, None]
    slots = jnp.where((slots >= 0) & (slots < y_rows), slots + first, -1)
    return fold(size, [*batched[:2], True, *batched[3:]], [*operands[:2], slots, *operands[3:]])


@custom_vmap
def _combine_experts_call(y, weights, slots):
    result = [((weights.shape[0], y.shape[1]), y.dtype)]
    return call("combine_experts", result, y, weights, slots)[0]


@batching_rule(_combine_experts_call)
def _(size, batched, *operands):
    return unfold(size, _combine_experts_call(*_fold_slots(size, batched, operands))), True


@custom_vmap
def _combine_experts_grad_call(y, weights, slots, d_out):
    results = [(y.shape, y.dtype), (weights.shape, jnp.float32)]
    return tuple(call("combine_experts_grad", results, y, weights, slots, d_out))


@batching_rule(_combine_experts_grad_call)
def _(size, batched, *operands):
    results = _combine_experts_grad_call(*_fold_slots(size, batched, operands))
    return unfold(size, results), (True, True)


@jax.custom_vjp
def _combine_experts(y, weights, slots):
    return _combine_experts_call(y, weights, slots)


def _combine_experts_fwd(y, weights, slots):
    return _combine_experts(y, weights, slots), (y, weights, slots)


def _combine_experts_bwd(residuals, d_out):
    return *_combine_experts_grad_call(*residuals, d_out), None


_combine_experts.defvjp(_combine_experts_fwd, _combine_experts_bwd)
