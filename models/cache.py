"""Keys and values of earlier tokens, in a buffer that XLA changes in place.

The buffer holds the values' bits as unsigned integers. XLA's CPU backend rounds a bf16 array that
is updated to fp32 and back as a whole, once for every layer of every decoded token; integers it
leaves alone. Every layer's slice is written and read by dynamic slices, because a scatter or a
buffer that enters the scan over layers as its input would be copied.

Shapes: L layers, B rows, S slots, T tokens of a call, G key-value heads, D head dim.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer: the bits of [L, B, S, G, D] each, u16 of bf16, u32 of f32."""

    k: Array
    v: Array

    @property
    def rows(self) -> int:
        return self.k.shape[1]

    @property
    def slots(self) -> int:
        return self.k.shape[2]


def empty(shape: tuple[int, ...], dtype: Any) -> Cache:
    """A cache of `shape` [L, B, S, G, D] for values of `dtype`."""
    words = _words(jnp.dtype(dtype))
    return Cache(jnp.zeros(shape, words), jnp.zeros(shape, words))


def write(cache: Cache, layer: Array, k: Array, v: Array, first: Array, real: Array) -> Cache:
    """The cache with keys and values [B, T, G, D] of a layer i32[] in the slots from first i32[].

    Padding, where real bool[B, T] is false, is not written. There is no derivative: under
    differentiation this raises NotImplementedError.
    """
    zero = jnp.int32(0)
    at = (layer, zero, first, zero, zero)

    def written(buffer: Array, new: Array) -> Array:
        old = lax.dynamic_slice(buffer, at, (1, *new.shape))
        new = jnp.where(real[None, :, :, None, None], _bits(new)[None], old)
        return lax.dynamic_update_slice(buffer, new, at)

    return Cache(written(cache.k, k), written(cache.v, v))


def read(cache: Cache, layer: Array, dtype: Any) -> tuple[Array, Array]:
    """Keys and values of a layer, [B, S, G, D] each."""
    k, v = (lax.bitcast_convert_type(buffer[layer], dtype) for buffer in (cache.k, cache.v))
    return k, v


@jax.custom_jvp
def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, _words(x.dtype))


@_bits.defjvp
def _(primals, tangents):
    raise NotImplementedError(
        "a forward pass with a cache has no derivative: integers carry the keys and values. Call "
        "the model without a cache to differentiate it"
    )


def _words(dtype: Any) -> Any:
    return {2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]
