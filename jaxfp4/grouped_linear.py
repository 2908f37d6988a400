"""grouped_linear: each row of x times the weight of its own group, as mixture-of-experts need.

Rows are sorted by group: group g has the `group_sizes[g]` rows after those of the groups before it.

    forward    y[i]  = front(x[rows[i]]) w[group of i] transposed         in NVFP4
    backward   dx, dw as in linear, group by group, in BF16 summed in fp32

Rows from sum(group_sizes) on belong to no group: they are not read (they may hold NaN), come out
zero and give zero gradients. An empty group's dw is zero. No size is read on the host, so group
sizes may differ at every call of one compiled program.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxfp4.array import Fp4Array
from jaxfp4.backends import BACKENDS, Implementation, take_rows, used_rows
from jaxfp4.custom_calls import match_varying
from jaxfp4.fronts import Front
from jaxfp4.linear import (
    check_operands,
    front_gradient,
    product_dtype,
    quantize_weight,
    resolve_out_dtype,
)
from jaxfp4.policy import NVFP4, Recipe
from jaxfp4.rounding import as_operand


def grouped_linear(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    recipe: Recipe = NVFP4,
    *,
    quantized: Fp4Array | None = None,
    front: Front | None = None,
    rows: jax.Array | None = None,
    out_dtype: Any = None,
    implementation: Implementation = "custom_call",
) -> jax.Array:
    """front(x[rows]) times each row's own group's weight, transposed.

    Args:
      x: bf16 or fp32 [M, K]; [M, 2K] with the SwiGLU front.
      w: bf16 or fp32 [G, N, K], G at least 1; one fp32 scale for each [N, K].
      group_sizes: int32 [G], not negative, with a sum of at most the number of rows. For other
        sizes the CPU's custom call raises when it runs, and the reference where their values are
        known, outside jit; traced ones it cannot check.
      recipe, quantized, front, out_dtype, implementation: as in linear.
      rows: int32 [M'] gathers x's rows first, fused into quantising (expert dispatch). A row
        outside x counts as a row of zeros without gradient.

    Returns:
      [M, N], or [M', N] with rows, of out_dtype.

    Raises:
      ValueError, TypeError: for shapes, dtypes or choices that are not legal.
    """
    check_operands(x, w, 3, recipe, quantized, front, implementation)
    if x.ndim != 2 or w.shape[0] == 0:
        raise ValueError(f"x must be [M, K] and w [G, N, K], G > 0, got {x.shape} and {w.shape}")
    for name, value in (("group_sizes", group_sizes), ("rows", rows)):
        if value is not None and (value.ndim != 1 or value.dtype != jnp.int32):
            raise ValueError(f"{name} must be int32 with one axis, got {value.dtype} {value.shape}")
    if group_sizes.shape[0] != w.shape[0]:
        raise ValueError(
            f"group_sizes has {group_sizes.shape[0]} groups and w {w.shape[0]} in shape {w.shape}"
        )
    if implementation == "reference" and not isinstance(group_sizes, Tracer):
        _check_group_sizes(np.asarray(group_sizes), (x if rows is None else rows).shape[0])
    operands = match_varying((x, w, group_sizes, rows, quantized, front))
    return _grouped_linear(*operands, recipe, resolve_out_dtype(out_dtype, x), implementation)


def _check_group_sizes(sizes: np.ndarray, rows: int) -> None:
    total = sizes.sum(dtype=np.int64)
    if (sizes < 0).any() or total > rows:
        raise ValueError(
            f"group_sizes={sizes.tolist()}: must not be negative and add up to at most the {rows} "
            f"rows, their sum is {total}"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _grouped_linear(x, w, sizes, rows, quantized, front, recipe, out_dtype, implementation):
    return _forward(x, w, sizes, rows, quantized, front, recipe, out_dtype, implementation)[0]


def _forward(x, w, sizes, rows, quantized, front, recipe, out_dtype, implementation):
    backend = BACKENDS[implementation]
    if recipe.activation is None:
        dtype = product_dtype(x, recipe)
        x_rows = x if rows is None else take_rows(x, rows)
        a = as_operand(backend.apply_front(front, x_rows), dtype)
        y = backend.grouped_matmul(a, as_operand(w, dtype), sizes, out_dtype)
        return y, (x, w, sizes, rows, front, None, None)
    q_w = quantize_weight(w, recipe, backend) if quantized is None else quantized
    m = x.shape[0] if rows is None else rows.shape[0]
    q_x = backend.quantize_rows(
        x,
        recipe.activation,
        rows_per_scale=1 if recipe.activation.scope == "row" else m,
        front=front,
        rows=rows,
        group_sizes=sizes,
    )
    kept = (q_x, q_w) if recipe.backward == "dequantized" else (None, None)
    y = backend.grouped_matmul(q_x, q_w, sizes, out_dtype)
    return y, (x, w, sizes, rows, front, *kept)


def _backward(recipe, out_dtype, implementation, residuals, g):
    backend = BACKENDS[implementation]
    x, w, sizes, rows, front, q_x, q_w = residuals
    dtype = product_dtype(x, recipe)
    # Rows of no group are zeroed before the front: what they hold may be NaN, and 0 * NaN is.
    x_rows = x if rows is None else take_rows(x, rows)
    x_rows = jnp.where(used_rows(x_rows.shape[0], sizes), x_rows, jnp.zeros((), x.dtype))
    a = as_operand(backend.apply_front(front, x_rows), dtype) if q_x is None else q_x.dequantize()
    b = as_operand(w, dtype) if q_w is None else q_w.dequantize()
    g = as_operand(g, dtype)
    dw = backend.grouped_matmul_dw(g, a, sizes, w.dtype)
    dx = backend.grouped_matmul_dx(g, b, sizes, x.dtype)
    d_front, dx = front_gradient(front, x_rows, dx)
    if rows is not None:
        dx = _add_rows(dx, rows, x)
    return dx, dw, None, None, None, d_front


def _add_rows(dx_rows: jax.Array, rows: jax.Array, x: jax.Array) -> jax.Array:
    """Sums the gathered rows' gradients back into x's rows, in fp32."""
    inside = (rows >= 0) & (rows < x.shape[0])
    target = jnp.where(inside, rows, x.shape[0])
    dx = jnp.zeros(x.shape, jnp.float32)
    dx = match_varying(dx, dx_rows)[0]
    return dx.at[target].add(dx_rows.astype(jnp.float32), mode="drop").astype(x.dtype)


_grouped_linear.defvjp(_forward, _backward)
