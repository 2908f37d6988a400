"""Ops along a row whose bits depend on that row alone: RMSNorm, SwiGLU, RoPE, residual additions.

A row here is a token (or one head of it). XLA chooses the order of a sum along a row by the shape
of the whole batch, so a token scored in another batch, or decoded alone, gets other bits. Each op
below is a custom call with an order of its own (ffi/numerics.h) instead: fp32 throughout, rounded
once at the end to the input's dtype. The derivatives are plain jnp: a sum over tokens (a weight's
gradient) has XLA's order.

Routing, attention and log-probabilities, which are of the same kind, have files of their own.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp4.batching import over_rows
from jaxfp4.checks import check_array, check_float
from jaxfp4.custom_calls import absent, call, match_varying
from jaxfp4.rounding import as_fp32, round_to_bf16


def _as_rows(x: jax.Array) -> jax.Array:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def residual_add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y; in bf16 really rounded, so that what XLA fuses around it changes no bit.

    In fp32 it is a plain addition, which XLA may contract with a multiplication that makes one of
    its operands; the results of custom calls are safe from that.

    Args:
      x, y: bf16 or fp32, of one shape and dtype.
    """
    check_float("x", x, 0)
    check_array("y", y, x.shape, x.dtype)
    if x.dtype == jnp.float32:
        return x + y
    return round_to_bf16(as_fp32(x) + as_fp32(y))


# --- RMSNorm ---


def rmsnorm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """x * (1 / sqrt(mean(x^2) + eps)) * weight (Zhang and Sennrich, 2019).

    Args:
      x: bf16 or fp32 [..., H].
      weight: bf16 or fp32 [H].
      eps: added to the mean of squares.

    Returns:
      [..., H] in x's dtype.
    """
    check_float("x", x)
    check_float("weight", weight)
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must have shape {x.shape[-1:]} like x's last axis {x.shape}, "
            f"got {weight.shape}"
        )
    y: jax.Array = _rmsnorm(*match_varying(_as_rows(x), weight), float(eps))
    return y.reshape(x.shape)


@functools.cache
def _rmsnorm_call(eps: float) -> Any:
    def run(x, weight):
        return call("rmsnorm", [(x.shape, x.dtype)], x, weight, eps=np.float32(eps))[0]

    return over_rows(run, shared=(1,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rmsnorm(x, weight, eps):
    return _rmsnorm_call(eps)(x, as_fp32(weight))


def _rmsnorm_fwd(x, weight, eps):
    return _rmsnorm(x, weight, eps), (x, weight)


def _rmsnorm_bwd(eps, residuals, dy):
    x, weight = residuals
    dx, dweight = _norm_grad(x, weight, dy.astype(jnp.float32), eps)
    return dx.astype(x.dtype), dweight.astype(weight.dtype)


def _norm_grad(x, weight, dy, eps):
    """fp32 dx and dweight of a norm along the last axis, from fp32 dy."""
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    inverse_rms = 1 / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(eps))
    normed = x * inverse_rms
    scaled = dy * weight
    dx = inverse_rms * (scaled - normed * (scaled * normed).mean(axis=-1, keepdims=True))
    return dx, (dy * normed).sum(axis=tuple(range(dy.ndim - 1)))


_rmsnorm.defvjp(_rmsnorm_fwd, _rmsnorm_bwd)


# --- SwiGLU ---


def swiglu(x: jax.Array) -> jax.Array:
    """gate / (1 + exp(-gate)) * up (Shazeer, 2020).

    Args:
      x: bf16 or fp32 [..., 2F], the gates in the first half.

    Returns:
      [..., F] in x's dtype.
    """
    check_float("x", x)
    if x.shape[-1] % 2:
        raise ValueError(f"x must have gate and up halves: an even last axis, got {x.shape}")
    return _swiglu(_as_rows(x)).reshape(*x.shape[:-1], x.shape[-1] // 2)


_swiglu_call = over_rows(lambda x: call("swiglu", [((x.shape[0], x.shape[1] // 2), x.dtype)], x)[0])


@jax.custom_vjp
def _swiglu(x):
    return _swiglu_call(x)


def _swiglu_fwd(x):
    return _swiglu(x), x


def _swiglu_bwd(x, dy):
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    dy = dy.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate)
    dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
    return (jnp.concatenate([dgate, dy * gate * sigmoid], axis=-1).astype(x.dtype),)


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)


# --- QK-norm and RoPE ---


def qk_norm_rope(
    x: jax.Array,
    weight: jax.Array | None,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    eps: float,
) -> jax.Array:
    """RMSNorm of each head, then rotary embedding (Su et al., 2021) of its two halves.

    With n the normalised head and angle[i] = positions * inv_freq[i]:

        y[i]       = n[i] * cos(angle[i]) - n[i + D/2] * sin(angle[i])
        y[i + D/2] = n[i + D/2] * cos(angle[i]) + n[i] * sin(angle[i])

    That is the half-split rotation of Hugging Face's Qwen3. Norm, cosines and rotation are fp32
    and the result is rounded once; Hugging Face rounds each of them to the stream's dtype.

    Args:
      x: bf16 or fp32 [..., heads, D], D even.
      weight: bf16 or fp32 [D], or None: no norm, the rotation alone.
      positions: int32 [...].
      inv_freq: fp32 [D/2], radians per position. It gets no gradient.
      eps: added to the mean of squares.

    Returns:
      [..., heads, D] in x's dtype.
    """
    check_float("x", x, 2)
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"x must have an even last axis to rotate its halves, got {x.shape}")
    if weight is not None:
        check_float("weight", weight)
        if weight.shape != (head_dim,):
            raise ValueError(f"weight must have shape {(head_dim,)}, got {weight.shape}")
    check_array("positions", positions, x.shape[:-2], jnp.int32)
    check_array("inv_freq", inv_freq, (head_dim // 2,), jnp.float32)
    tokens = positions.size
    y: jax.Array = _qk_norm_rope(
        *match_varying(
            x.reshape(tokens, *x.shape[-2:]),
            absent(jnp.float32) if weight is None else weight,
            positions.reshape(tokens),
            inv_freq,
        ),
        float(eps),
    )
    return y.reshape(x.shape)


@functools.cache
def _qk_norm_rope_call(eps: float) -> Any:
    def run(x, weight, positions, inv_freq):
        result = [(x.shape, x.dtype)]
        return call("qk_norm_rope", result, x, weight, positions, inv_freq, eps=np.float32(eps))[0]

    return over_rows(run, shared=(1, 3))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _qk_norm_rope(x, weight, positions, inv_freq, eps):
    return _qk_norm_rope_call(eps)(x, as_fp32(weight), positions, inv_freq)


def _qk_norm_rope_fwd(x, weight, positions, inv_freq, eps):
    y: jax.Array = _qk_norm_rope(x, weight, positions, inv_freq, eps)
    return y, (x, weight, positions, inv_freq)


def _qk_norm_rope_bwd(eps, residuals, dy):
    x, weight, positions, inv_freq = residuals
    angle = positions.astype(jnp.float32)[:, None, None] * inv_freq
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(dy.astype(jnp.float32), 2, axis=-1)
    # The rotation by the negative angle.
    dnormed = jnp.concatenate(
        [first * cosine + second * sine, second * cosine - first * sine], axis=-1
    )
    if weight.shape[0] == 0:
        return dnormed.astype(x.dtype), jnp.zeros_like(weight), None, None
    dx, dweight = _norm_grad(x, weight, dnormed, eps)
    return dx.astype(x.dtype), dweight.astype(weight.dtype), None, None


_qk_norm_rope.defvjp(_qk_norm_rope_fwd, _qk_norm_rope_bwd)
