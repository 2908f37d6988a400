"""linear: y = front(x) times w transposed, forward in NVFP4, backward in BF16.

    forward    y  = bf16( (sum_k a_k b_k) * scale_b * scale_a )   a, b: codes times block scales
    backward   dx = g w,   dw = g' front(x)                       in BF16, summed in fp32

The backward product's operands are x and w rounded to bf16 (`backward="original"`) or the values
that the forward product really used ("dequantized"); either way quantising itself counts as the
identity (straight-through). A front is recomputed in the backward, not kept. With
`recipe=UNQUANTIZED` the same kernels multiply bf16 operands, or fp32 ones where x is fp32.

Left out: a bias, which is an addition of the caller's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxfp4.array import Fp4Array
from jaxfp4.backends import BACKENDS, Backend, Implementation
from jaxfp4.checks import check_float, check_fp4, check_front, check_quantizable
from jaxfp4.custom_calls import match_varying
from jaxfp4.fronts import Front, quantized_width
from jaxfp4.policy import NVFP4, UNQUANTIZED, Recipe
from jaxfp4.quantize import quantize
from jaxfp4.rounding import as_operand


def linear(
    x: jax.Array,
    w: jax.Array,
    recipe: Recipe = NVFP4,
    *,
    quantized: Fp4Array | None = None,
    front: Front | None = None,
    out_dtype: Any = None,
    implementation: Implementation = "custom_call",
) -> jax.Array:
    """front(x) times w transposed.

    Args:
      x: bf16 or fp32 [..., K]; [..., 2K] with the SwiGLU front.
      w: bf16 or fp32 [N, K], as Hugging Face stores it. fp32 masters are rounded to bf16, but for
        an fp32 x with UNQUANTIZED, which is an fp32 product.
      recipe: how both operands are quantised, and the backward's operands.
      quantized: prepare(w, recipe), if it is at hand; gradients go to w all the same.
      front: SwiGLU(), RMSNorm(weight, eps) or None, applied to x before it is quantised.
      out_dtype: bfloat16 or float32; x's dtype by default. float32 keeps the fp32 sums.
      implementation: "custom_call", or "reference" for plain jnp on any platform.

    Returns:
      [..., N] of out_dtype.

    Raises:
      ValueError, TypeError: for shapes, dtypes or choices that are not legal.
    """
    check_operands(x, w, 2, recipe, quantized, front, implementation)
    out_dtype = resolve_out_dtype(out_dtype, x)
    rows = x.reshape(-1, x.shape[-1])
    operands = match_varying((rows, w, quantized, front))
    y: jax.Array = _linear(*operands, recipe, out_dtype, implementation)
    return y.reshape(*x.shape[:-1], w.shape[0])


def prepare(w: jax.Array, recipe: Recipe) -> Fp4Array | None:
    """The quantised weight alone, made once per update and read by every forward after it.

    Args:
      w: bf16 or fp32 [..., N, K]; leading axes (experts, stacked layers) are kept, each matrix
        with its own scale.

    Returns:
      Fp4Array of shape [..., N, K]; None where the recipe does not quantise weights.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a jaxfp4.Recipe, got {recipe!r}")
    if recipe.weight is None:
        return None
    quantizer = recipe.weight
    check_quantizable("w", w, w.shape[-1] if w.ndim else 0)
    # Gradients reach w through the product that uses the result.
    w16 = as_operand(jax.lax.stop_gradient(w), jnp.bfloat16)
    return quantize(w16, quantizer.scope, quantizer.pow2_scale, quantizer.four_over_six)


def quantize_weight(w: jax.Array, recipe: Recipe, backend: Backend) -> Fp4Array:
    """prepare(w, recipe) of [N, K] or [G, N, K] by a backend, for an unprepared weight."""
    assert recipe.weight is not None
    if w.size == 0:
        return quantize(w.astype(jnp.bfloat16), recipe.weight.scope)
    rows_per_scale = 1 if recipe.weight.scope == "row" else w.shape[-2]
    q = backend.quantize_rows(
        as_operand(w, jnp.bfloat16).reshape(-1, w.shape[-1]),
        recipe.weight,
        rows_per_scale=rows_per_scale,
    )
    scale_shape = w.shape[:-1] if recipe.weight.scope == "row" else w.shape[:-2]
    return Fp4Array(
        q.codes.reshape(*w.shape[:-1], -1),
        q.block_scales.reshape(*w.shape[:-1], -1),
        q.scale.reshape(scale_shape),
    )


def check_operands(
    x: jax.Array,
    w: jax.Array,
    w_ndim: int,
    recipe: Recipe,
    quantized: Fp4Array | None,
    front: Front | None,
    implementation: str,
) -> None:
    """Raises for what is not legal in linear (w_ndim 2) or grouped_linear (w_ndim 3)."""
    if implementation not in BACKENDS:
        raise ValueError(
            f"implementation must be 'custom_call' or 'reference', got {implementation!r}"
        )
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a jaxfp4.Recipe, got {recipe!r}")
    check_float("x", x)
    check_float("w", w)
    form = "[N, K]" if w_ndim == 2 else "[G, N, K]"
    if w.ndim != w_ndim or x.ndim < 1:
        raise ValueError(f"w must be {form} and x [..., K], got w {w.shape} and x {x.shape}")
    depth = quantized_width(front, x.shape[-1])
    check_front(front, x.shape[-1])
    if depth != w.shape[-1] or depth == 0:
        raise ValueError(
            f"w of shape {w.shape} takes {w.shape[-1]} values a row, but x of shape {x.shape} "
            f"has {depth}" + (f" after its front {front!r}" if front is not None else "")
        )
    if recipe.activation is not None:
        check_quantizable("x", x, depth)
    if quantized is not None:
        if recipe.weight is None:
            raise ValueError("quantized must be None where the recipe does not quantise weights")
        check_fp4("quantized", quantized, w.shape, recipe.weight.scope)


def resolve_out_dtype(out_dtype: Any, x: jax.Array) -> Any:
    """out_dtype, x's by default, as a dtype."""
    resolved = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if resolved not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"out_dtype must be bfloat16 or float32, got {resolved}")
    return resolved


def product_dtype(x: jax.Array, recipe: Recipe) -> Any:
    """The dtype of unquantised operands: bf16, or fp32 for an fp32 x that nothing quantises."""
    return jnp.float32 if recipe == UNQUANTIZED and x.dtype == jnp.float32 else jnp.bfloat16


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _linear(x, w, quantized, front, recipe, out_dtype, implementation):
    return _forward(x, w, quantized, front, recipe, out_dtype, implementation)[0]


def _forward(x, w, quantized, front, recipe, out_dtype, implementation):
    backend = BACKENDS[implementation]
    if recipe.activation is None:
        dtype = product_dtype(x, recipe)
        a = as_operand(backend.apply_front(front, x), dtype)
        return backend.matmul(a, as_operand(w, dtype), out_dtype), (x, w, front, None, None)
    q_w = quantize_weight(w, recipe, backend) if quantized is None else quantized
    rows_per_scale = 1 if recipe.activation.scope == "row" else x.shape[0]
    q_x = backend.quantize_rows(x, recipe.activation, rows_per_scale=rows_per_scale, front=front)
    kept = (q_x, q_w) if recipe.backward == "dequantized" else (None, None)
    return backend.matmul(q_x, q_w, out_dtype), (x, w, front, *kept)


def _backward(recipe, out_dtype, implementation, residuals, g):
    backend = BACKENDS[implementation]
    x, w, front, q_x, q_w = residuals
    dtype = product_dtype(x, recipe)
    a = as_operand(backend.apply_front(front, x), dtype) if q_x is None else q_x.dequantize()
    b = as_operand(w, dtype) if q_w is None else q_w.dequantize()
    g = as_operand(g, dtype)
    dw = backend.matmul_dw(g, a, w.dtype)
    dx = backend.matmul_dx(g, b, x.dtype)
    d_front, dx = front_gradient(front, x, dx)
    return dx, dw, None, d_front


def front_gradient(front: Front | None, x: jax.Array, g: jax.Array) -> tuple[Any, jax.Array]:
    """The gradients to front's weights and to x, given the gradient g of front(x)."""
    if front is None:
        return None, g
    _, vjp = jax.vjp(lambda front, x: front.formula(x), front, x)
    return vjp(g)


_linear.defvjp(_forward, _backward)
