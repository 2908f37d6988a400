"""Roundings to bf16 that XLA may not undo.

XLA may compute a fused bf16 operation in fp32 and drop the rounding between two of them
(`xla_allow_excess_precision`, on by default), so the same expression has other bits in another
program. `reduce_precision` is the rounding that it keeps.
"""

from typing import Any

import jax
import jax.numpy as jnp


def round_to_bf16(x: jax.Array) -> jax.Array:
    """fp32 x really rounded to bf16: a convert there and back is one that XLA may drop."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def as_fp32(x: jax.Array) -> jax.Array:
    """x in fp32, where XLA may not undo the rounding to bf16 that made x."""
    if x.dtype == jnp.float32:
        return x
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)


def as_operand(x: jax.Array, dtype: Any) -> jax.Array:
    """x as a bf16 or fp32 operand of a product, with the value that x really has."""
    return as_fp32(x) if dtype == jnp.float32 else round_to_bf16(as_fp32(x))
