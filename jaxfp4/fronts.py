"""Fronts: what a linear layer's input goes through before it is quantised, fused into one pass.

    SwiGLU        gate / (1 + exp(-gate)) * up             x is [..., 2K], gate first
    RMSNorm       x / sqrt(mean(x^2) + eps) * weight       x is [..., K]

Both are computed in fp32 and rounded once to x's dtype, so a fused front gives byte for byte what
`swiglu` or `rmsnorm` followed by `quantize` gives. `formula` is the same function in plain jnp,
for its derivative; its last bits are XLA's.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """gate / (1 + exp(-gate)) * up of x [..., 2K], the gate in its first half."""

    def formula(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return (jax.nn.silu(gate) * up).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight of x [..., K].

    Attributes:
      weight: bf16 or fp32 [K]; gradients flow to it.
      eps: added to the mean of squares.
    """

    weight: jax.Array
    eps: float = dataclasses.field(metadata={"static": True})

    def formula(self, x: jax.Array) -> jax.Array:
        values = x.astype(jnp.float32)
        mean = jnp.mean(values * values, axis=-1, keepdims=True)
        normed = values * jax.lax.rsqrt(mean + self.eps)
        return (normed * self.weight.astype(jnp.float32)).astype(x.dtype)


Front = SwiGLU | RMSNorm


def quantized_width(front: Front | None, width: int) -> int:
    """The width of front(x) where x has `width` values a row."""
    return width // 2 if isinstance(front, SwiGLU) else width
