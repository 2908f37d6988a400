"""quantize: rows of bf16 or fp32 values to NVFP4, in one custom call.

For a row (or matrix) with the largest magnitude amax, and within it a block of 16 values with
the largest magnitude bmax:

    encode = min(2688 / amax, 2^100)                       (1 if amax is 0)
    sf     = e4m3(bmax * encode / 6)                       the block's scale
    code   = e2m1(x / (sf / encode))
    scale  = 1 / encode                                    the fp32 scale

The exact order of the fp32 operations is that of ffi/numerics.h. Inputs that are not finite make
NaN what shares their scale and nothing else.

Left out: derivatives. Quantising is not differentiable; `linear` gives the straight-through
gradient of its product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from jaxfp4.array import Fp4Array
from jaxfp4.batching import batching_rule, broadcast, first_rows, loop, merge, unfold
from jaxfp4.checks import check_array, check_quantizable
from jaxfp4.custom_calls import absent, call, match_varying
from jaxfp4.format import BLOCK
from jaxfp4.fronts import Front, RMSNorm, SwiGLU
from jaxfp4.policy import Quantizer, Scope
from jaxfp4.rounding import as_fp32

_FRONT_NONE, _FRONT_SWIGLU, _FRONT_RMSNORM = 0, 1, 2


def quantize(
    x: jax.Array,
    scope: Scope = "row",
    pow2_scale: bool = False,
    four_over_six: bool = False,
    amax: jax.Array | None = None,
) -> Fp4Array:
    """Quantises x to NVFP4.

    Args:
      x: bf16 or fp32 [..., K], K a positive multiple of 16.
      scope: "row": one fp32 scale a row; "tensor": one a matrix x[..., :, :].
      pow2_scale: round the fp32 scale up to a power of two.
      four_over_six: choose each block's scale between two candidates by squared error.
      amax: fp32 of the scale's shape, if known already: the largest magnitude that shares the
        scale. 0 means scale 1; a negative one counts as NaN; one too small saturates.

    Returns:
      Fp4Array of shape [..., K]; scale is [...] for scope "row", [...][:-1] for "tensor".

    Raises:
      ValueError, TypeError: for a shape, dtype or scope that is not legal.
    """
    quantizer = Quantizer(scope, pow2_scale, four_over_six)
    check_quantizable("x", x, x.shape[-1] if x.ndim else 0)
    if scope == "tensor" and x.ndim < 2:
        raise ValueError(f"scope 'tensor' needs a matrix, got x of shape {x.shape}")
    scale_shape = x.shape[:-1] if scope == "row" else x.shape[:-2]
    if amax is not None:
        check_array("amax", amax, scale_shape, jnp.float32)
    if x.size == 0:
        return Fp4Array(
            jnp.zeros((*x.shape[:-1], x.shape[-1] // 2), jnp.uint8),
            jnp.zeros((*x.shape[:-1], x.shape[-1] // BLOCK), jnp.float8_e4m3fn),
            jnp.ones(scale_shape, jnp.float32),
        )
    rows_per_scale = 1 if scope == "row" else x.shape[-2]
    q = quantize_rows(
        x.reshape(-1, x.shape[-1]),
        quantizer,
        rows_per_scale=rows_per_scale,
        amax=None if amax is None else amax.reshape(-1),
    )
    return Fp4Array(
        q.codes.reshape(*x.shape[:-1], -1),
        q.block_scales.reshape(*x.shape[:-1], -1),
        q.scale.reshape(scale_shape),
    )


def quantize_rows(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    rows_per_scale: int,
    front: Front | None = None,
    rows: jax.Array | None = None,
    amax: jax.Array | None = None,
    group_sizes: jax.Array | None = None,
) -> Fp4Array:
    """Quantises front(x[rows]) with codes [M, K/2] and one scale every `rows_per_scale` rows.

    Rows from sum(group_sizes) on are not read, nor are those that `rows` takes from outside x:
    both come out as zeros with scale 1.
    """
    if rows is not None and rows.shape[0] == 0:
        x, rows = x[:0], None
    weight = absent(jnp.float32)
    kind, eps = _FRONT_NONE, 0.0
    if isinstance(front, SwiGLU):
        kind = _FRONT_SWIGLU
    elif isinstance(front, RMSNorm):
        kind, eps = _FRONT_RMSNORM, front.eps
        weight = as_fp32(front.weight)
    run = _quantize_call(kind, eps, rows_per_scale, quantizer.pow2_scale, quantizer.four_over_six)
    codes, block_scales, scale = run(
        *match_varying(
            x,
            weight,
            absent(jnp.int32) if rows is None else rows,
            absent(jnp.float32) if amax is None else amax,
            absent(jnp.int32) if group_sizes is None else group_sizes,
        )
    )
    return Fp4Array(codes, block_scales, scale)


@functools.cache
def _quantize_call(
    front: int, eps: float, rows_per_scale: int, pow2_scale: bool, four_over_six: bool
) -> Any:
    """The custom call `quantize` with its attributes bound and its batching rule."""

    @custom_vmap
    def run(x, front_weight, rows, amax, group_sizes):
        m = rows.shape[0] or x.shape[0]
        depth = x.shape[1] // 2 if front == _FRONT_SWIGLU else x.shape[1]
        scales = m // rows_per_scale if rows_per_scale else 0
        return tuple(
            call(
                "quantize",
                [
                    ((m, depth // 2), jnp.uint8),
                    ((m, depth // BLOCK), jnp.float8_e4m3fn),
                    ((scales,), jnp.float32),
                ],
                x,
                front_weight,
                rows,
                amax,
                group_sizes,
                front=np.int64(front),
                eps=np.float32(eps),
                rows_per_scale=np.int64(rows_per_scale),
                pow2_scale=pow2_scale,
                four_over_six=four_over_six,
            )
        )

    @batching_rule(run)
    def _(size, batched, x, front_weight, rows, amax, group_sizes):
        # The batch folds into the rows. What differs from one element of the batch to the next,
        # the gathered rows and the number of rows in use, becomes one gather with -1 for a row
        # that is not to be read.
        if batched[1]:
            operands = (x, front_weight, rows, amax, group_sizes)
            return loop(run, batched, operands), (True,) * 3
        x, rows, amax, group_sizes = broadcast(
            size, [batched[0], *batched[2:]], (x, rows, amax, group_sizes)
        )
        x_rows = x.shape[1]
        if rows.shape[1] or group_sizes.shape[1]:
            every = jnp.broadcast_to(jnp.arange(x_rows, dtype=jnp.int32), (size, x_rows))
            index = rows if rows.shape[1] else every
            outside = (index < 0) | (index >= x_rows)
            if group_sizes.shape[1]:
                used = group_sizes.sum(axis=1, keepdims=True, dtype=jnp.int32)
                outside |= jnp.arange(index.shape[1], dtype=jnp.int32) >= used
            rows = jnp.where(outside, -1, index + first_rows(size, x_rows)[:, None])
        outputs = run(merge(x), front_weight, merge(rows), merge(amax), absent(jnp.int32))
        return unfold(size, outputs), (True,) * 3

    return run
