"""The compute backends of linear and grouped_linear: one table of functions each.

    custom_call   the XLA custom calls, each with its kernel for every platform it is built for
    reference     plain jnp on any platform: the same numbers but for the order of fp32 sums

A layer names its backend; none stands in for another in silence.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfp4 import products, reference, rowwise
from jaxfp4.array import Fp4Array
from jaxfp4.format import BLOCK
from jaxfp4.fronts import Front, RMSNorm, SwiGLU
from jaxfp4.policy import Quantizer
from jaxfp4.quantize import quantize_rows

Implementation = Literal["custom_call", "reference"]


@dataclasses.dataclass(frozen=True)
class Backend:
    """What a linear layer computes with; see quantize.py and products.py."""

    apply_front: Callable[[Front | None, jax.Array], jax.Array]
    quantize_rows: Callable[..., Fp4Array]
    matmul: Callable[..., jax.Array]
    matmul_dx: Callable[..., jax.Array]
    matmul_dw: Callable[..., jax.Array]
    grouped_matmul: Callable[..., jax.Array]
    grouped_matmul_dx: Callable[..., jax.Array]
    grouped_matmul_dw: Callable[..., jax.Array]


def _apply_front(front: Front | None, x: jax.Array) -> jax.Array:
    match front:
        case None:
            return x
        case SwiGLU():
            return rowwise.swiglu(x)
        case RMSNorm():
            return rowwise.rmsnorm(x, front.weight, eps=front.eps)


def _reference_apply_front(front: Front | None, x: jax.Array) -> jax.Array:
    match front:
        case None:
            return x
        case SwiGLU():
            return reference.swiglu(x)
        case RMSNorm():
            return reference.rmsnorm(x, front.weight, front.eps)


def take_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
    """x[rows], with zeros for a row outside x."""
    if x.shape[0] == 0:
        return jnp.zeros((rows.shape[0], x.shape[1]), x.dtype)
    inside = (rows >= 0) & (rows < x.shape[0])
    taken = jnp.take(x, jnp.where(inside, rows, 0), axis=0, mode="clip")
    return jnp.where(inside[:, None], taken, jnp.zeros((), x.dtype))


def used_rows(rows: int, group_sizes: jax.Array) -> jax.Array:
    """bool [rows, 1]: whether the row belongs to a group."""
    used = group_sizes.sum(dtype=jnp.int32)
    return (jnp.arange(rows, dtype=jnp.int32) < used)[:, None]


def _reference_quantize_rows(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    rows_per_scale: int,
    front: Front | None = None,
    rows: jax.Array | None = None,
    amax: jax.Array | None = None,
    group_sizes: jax.Array | None = None,
) -> Fp4Array:
    x = x if rows is None else take_rows(x, rows)
    x = _reference_apply_front(front, x)
    if group_sizes is not None:
        x = jnp.where(used_rows(x.shape[0], group_sizes), x, jnp.zeros((), x.dtype))
    m = x.shape[0]
    scales = m // rows_per_scale if rows_per_scale else 1
    matrices = x if quantizer.scope == "row" else x.reshape(scales, rows_per_scale, x.shape[-1])
    codes, block_scales, scale = reference.quantize(
        matrices, quantizer.scope, quantizer.pow2_scale, quantizer.four_over_six, amax
    )
    depth = x.shape[1]
    return Fp4Array(codes.reshape(m, depth // 2), block_scales.reshape(m, depth // BLOCK), scale)


def _reference_operand(operand: Any) -> tuple[jax.Array, jax.Array | None]:
    if not isinstance(operand, Fp4Array):
        return operand, None
    scale = operand.scale
    return operand.values(), scale.reshape(()) if scale.size == 1 else scale


def _reference_matmul(a: Any, b: Any, dtype: Any) -> jax.Array:
    (a, a_scale), (b, b_scale) = _reference_operand(a), _reference_operand(b)
    return reference.product(a, b, a_scale, b_scale, dtype)


def _reference_grouped_matmul(a: Any, b: Any, group_sizes: jax.Array, dtype: Any) -> jax.Array:
    a, a_scale = _reference_operand(a)
    b, b_scale = (b.values(), b.scale) if isinstance(b, Fp4Array) else (b, None)
    return reference.grouped_product(a, b, group_sizes, a_scale, b_scale, dtype)


BACKENDS: dict[Implementation, Backend] = {
    "custom_call": Backend(
        apply_front=_apply_front,
        quantize_rows=quantize_rows,
        matmul=products.matmul,
        matmul_dx=products.matmul_dx,
        matmul_dw=products.matmul_dw,
        grouped_matmul=products.grouped_matmul,
        grouped_matmul_dx=products.grouped_matmul_dx,
        grouped_matmul_dw=products.grouped_matmul_dw,
    ),
    "reference": Backend(
        apply_front=_reference_apply_front,
        quantize_rows=_reference_quantize_rows,
        matmul=_reference_matmul,
        matmul_dx=lambda g, w, dtype: reference.product(g, w.mT, out_dtype=dtype),
        matmul_dw=lambda g, x, dtype: reference.product(g.mT, x.mT, out_dtype=dtype),
        grouped_matmul=_reference_grouped_matmul,
        grouped_matmul_dx=lambda g, w, group_sizes, dtype: reference.grouped_product(
            g, w.mT, group_sizes, out_dtype=dtype
        ),
        grouped_matmul_dw=lambda g, x, group_sizes, dtype: reference.grouped_outer_product(
            g, x, group_sizes, dtype
        ),
    ),
}
