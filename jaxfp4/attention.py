"""Attention over a buffer of key slots, whose bits do not depend on how it is called.

Each query attends to a range of slots of its own batch element. One op serves decoding (one query),
prefill and training (all queries), padding on either side and several sequences packed in one row.
A query takes its keys in blocks of 64 counted from its own first key, with an online softmax in
fp32 (Dao, 2023), and slots outside its range take no part. So decode, prefill and training give a
token the same bits, whatever the padding and the buffer's length. Several query heads may share one
key-value head (Ainslie et al., 2023).

The exact order is stated in ffi/cpu/attention.h. The derivative is deterministic, with sums over
queries in an order of its own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp4.batching import over_rows
from jaxfp4.checks import check_array, check_float
from jaxfp4.custom_calls import call, match_varying


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_start: jax.Array,
    key_end: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """softmax(scale * q k^T) v of each query over its slots key_start <= s < key_end.

    Args:
      q: bf16 or fp32 [B, T, Hq, D].
      k, v: in q's dtype, [B, S, Hk, D], Hk a divisor of Hq. Query head h reads key-value head
        h // (Hq / Hk).
      key_start, key_end: int32 [B, T], cut to [0, S]. Where the range is empty the output and all
        gradients are zero.
      scale: D**-0.5 by default.

    Returns:
      [B, T, Hq, D] in q's dtype. Softmax and sums are fp32, rounded once.
    """
    check_float("q", q)
    if q.ndim != 4 or 0 in q.shape[2:]:
        raise ValueError(f"q must be [B, T, Hq, D] with heads of elements, got shape {q.shape}")
    batch, queries, heads, head_dim = q.shape
    if k.ndim != 4 or k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"k must be [{batch}, S, Hk, {head_dim}] beside q {q.shape}, got {k.shape}"
        )
    if k.shape[2] == 0 or heads % k.shape[2]:
        raise ValueError(f"k's heads must divide q's {heads} heads, got k of shape {k.shape}")
    check_array("k", k, k.shape, q.dtype)
    check_array("v", v, k.shape, q.dtype)
    check_array("key_start", key_start, (batch, queries), jnp.int32)
    check_array("key_end", key_end, (batch, queries), jnp.int32)
    scale = head_dim**-0.5 if scale is None else float(scale)
    return _attention(*match_varying(q, k, v, key_start, key_end), scale)


@functools.cache
def _attention_call(scale: float) -> Any:
    def run(q, k, v, key_start, key_end):
        results = [(q.shape, q.dtype), (q.shape[:3], jnp.float32)]
        return tuple(
            call("attention", results, q, k, v, key_start, key_end, scale=np.float32(scale))
        )

    return over_rows(run)


@functools.cache
def _attention_grad_call(scale: float) -> Any:
    def run(q, k, v, *others):
        results = [(q.shape, q.dtype), (k.shape, k.dtype), (v.shape, v.dtype)]
        return tuple(call("attention_grad", results, q, k, v, *others, scale=np.float32(scale)))

    return over_rows(run)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q, k, v, key_start, key_end, scale):
    return _attention_call(scale)(q, k, v, key_start, key_end)[0]


def _attention_fwd(q, k, v, key_start, key_end, scale):
    o, lse = _attention_call(scale)(q, k, v, key_start, key_end)
    return o, (q, k, v, key_start, key_end, o, lse)


def _attention_bwd(scale, residuals, d_o):
    return *_attention_grad_call(scale)(*residuals, d_o), None, None


_attention.defvjp(_attention_fwd, _attention_bwd)
