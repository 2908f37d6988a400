"""The policy's weights as both sides read them, and a fingerprint of their bytes.

Weights are quantised once after each optimiser step. Sampler, learner, scoring and checkpoints
then read one `Weights`; that they do is checked by comparing fingerprints.
"""

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """Parameters and what was prepared from them.

    params: the model's parameters (`nnx.State`), fp32 masters.
    prepared: `model.prepare()`: the quantised weights, made from exactly these params.
    """

    params: Any
    prepared: Any


@partial(jax.jit, static_argnames="graphdef")
def prepare(params: Any, *, graphdef: nnx.GraphDef) -> Weights:
    """Quantises the weights of the model `nnx.merge(graphdef, params)`."""
    return Weights(params, nnx.merge(graphdef, params).prepare())


def weight_hash(weights: Weights) -> str:
    """A fingerprint of all bytes of the parameters and of the prepared codes and scales.

    Words are mixed on the device with their position and added modulo 2^32, which has the same
    result in any order and so on any mesh; the host hashes the sums with each leaf's path, shape
    and dtype. It tells apart weights that differ by accident; it is no defence against intent.

    Returns:
      32 hexadecimal digits.
    """
    sums = jax.device_get(_checksums(weights))
    text = [
        f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {total.tolist()}"
        for (path, leaf), total in zip(
            jax.tree_util.tree_leaves_with_path(weights), sums, strict=True
        )
    ]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:32]


@jax.jit
def _checksums(weights: Weights) -> list[jax.Array]:
    """Two 32-bit sums for each leaf: u32[2]."""
    return [_checksum(leaf) for leaf in jax.tree.leaves(weights)]


def _checksum(leaf: jax.Array) -> jax.Array:
    width = leaf.dtype.itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
    words = lax.bitcast_convert_type(leaf, unsigned).reshape(-1).astype(jnp.uint32)
    position = lax.iota(jnp.uint32, words.size)
    return jnp.stack([_mixed(words, position, seed).sum(dtype=jnp.uint32) for seed in (1, 2)])


def _mixed(words: jax.Array, position: jax.Array, seed: int) -> jax.Array:
    """The finaliser of MurmurHash3 over (word, position, seed)."""
    h = words ^ (position * jnp.uint32(0x9E3779B9) + jnp.uint32(seed * 0x7F4A7C15 & 0xFFFFFFFF))
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        h = (h ^ (h >> jnp.uint32(16))) * jnp.uint32(multiplier)
    return h ^ (h >> jnp.uint32(13))
