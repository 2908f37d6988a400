"""statistics: what quantising did to a tensor, counted block by block.

A block is flushed if it holds a nonzero value and its e4m3 scale is 0 (its largest value is below
2.2e-6 of what its fp32 scale can hold); subnormal if its scale is an e4m3 subnormal, which has
fewer than three mantissa bits; saturated if its largest value is more than its scale can hold
(only where amax was given and too small); non-finite if its scale is NaN.

Plain jnp: it runs on any platform, under jit, and counts logical blocks only, never padding.
"""

import jax
import jax.numpy as jnp

from jaxfp4.array import Fp4Array
from jaxfp4.checks import check_fp4
from jaxfp4.format import BLOCK, E2M1_MAX

_LARGEST_BELOW_E4M3_OVERFLOW = 464.0  # halfway between 448 and 480: rounds to 448 or saturates


def statistics(x: jax.Array, q: Fp4Array) -> dict[str, jax.Array]:
    """Counts of blocks and the error of q = quantize(x).

    Args:
      x: bf16 or fp32 [..., K].
      q: Fp4Array of the same shape.

    Returns:
      int32 scalars blocks, flushed_blocks, subnormal_blocks, saturated_blocks, nonfinite_blocks;
      fp32 scalars smallest_block_scale (over all finite blocks) and relative_error, the
      root of sum((x - q)^2) / sum(x^2) over finite blocks (0 where x is zero).
    """
    check_fp4("q", q, x.shape, q.scope)
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1)
    sf = q.block_scales.astype(jnp.float32)
    scale = q.scale[..., None] if q.scope == "row" else q.scale[..., None, None]
    finite = ~jnp.isnan(sf)

    def count(which: jax.Array) -> jax.Array:
        return jnp.sum(which, dtype=jnp.int32)

    values = q.dequantize(jnp.float32).reshape(blocks.shape)
    keep = finite[..., None]
    # By the largest magnitude, so that no square overflows; by an eighth of both, because XLA may
    # multiply by the unit's reciprocal, which would be subnormal for the largest of units.
    unit = jnp.max(jnp.where(keep, jnp.abs(blocks), 0.0), initial=0.0) / 8
    unit = jnp.maximum(unit, 2.0**-126)
    error = jnp.sum(jnp.where(keep, (blocks / 8 - values / 8) / unit, 0.0) ** 2)
    total = jnp.sum(jnp.where(keep, blocks / 8 / unit, 0.0) ** 2)
    capacity = _LARGEST_BELOW_E4M3_OVERFLOW * E2M1_MAX * scale
    return {
        "blocks": jnp.int32(sf.size),
        "flushed_blocks": count((sf == 0) & (largest > 0)),
        "subnormal_blocks": count((sf > 0) & (sf < 2.0**-6)),
        "saturated_blocks": count(finite & (largest > capacity)),
        "nonfinite_blocks": count(~finite),
        "smallest_block_scale": jnp.min(jnp.where(finite, sf, jnp.inf), initial=jnp.inf),
        "relative_error": jnp.sqrt(error / jnp.where(total > 0, total, 1.0)),
    }
