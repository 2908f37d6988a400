"""The attention and the dense MLP of a decoder block.

    x += o_proj(attention(rope(q_norm(q)), rope(k_norm(k)), v)),
                                           [q; k; v] = qkv_proj(rmsnorm(x))
    x += down_proj(silu(gate) * up),       [gate; up] = gate_up_proj(rmsnorm(x))

q, k, v are one matrix and gate, up another, each with one scale when quantised. Both norms are
fused in front of the products that follow, and SwiGLU in front of the down projection.

Every parameter has a leading axis over the layers of its kind. The methods compute one layer:
`jax.lax.scan` hands them the module with that axis taken off.

Shapes: B rows, T tokens, S cache slots, L layers, H hidden, I intermediate, Q query heads,
G key-value heads, D head dim.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import jaxfp4
from models.config import Qwen3Config


class Span(NamedTuple):
    """Which keys each query may see, and where this call's keys are written.

    position, key_start, key_end: i32[B, T]. Query (b, t) attends to the slots
    key_start <= s < key_end of row b; padding has an empty range.
    first: i32[]. The key and value of token t go to slot first + t of a cache.
    real: bool[B, T], which tokens are not padding.
    """

    position: Array
    key_start: Array
    key_end: Array
    first: Array
    real: Array


class LayerRecipes(NamedTuple):
    """The recipes of the four quantisable products of one layer."""

    qkv_proj: jaxfp4.Recipe
    o_proj: jaxfp4.Recipe
    gate_up_proj: jaxfp4.Recipe
    down_proj: jaxfp4.Recipe


class QuantizedLayer(NamedTuple):
    """Prepared weights of the four products of one layer; None is quantised at its use."""

    qkv_proj: jaxfp4.Fp4Array | None = None
    o_proj: jaxfp4.Fp4Array | None = None
    gate_up_proj: jaxfp4.Fp4Array | None = None
    down_proj: jaxfp4.Fp4Array | None = None


def normal_param(rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float, dtype) -> nnx.Param:
    """A matrix (or a stack of them) drawn from N(0, stddev^2)."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape, dtype))


class Attention(nnx.Module):
    """Grouped-query attention with its norm: input_norm [L, H], qkv_proj [L, (Q + 2G) D, H],
    qkv_bias [L, (Q + 2G) D] or None, q_norm and k_norm [L, D] or None, o_proj [L, H, Q D]."""

    def __init__(self, config: Qwen3Config, layers: int, *, param_dtype, rngs: nnx.Rngs):
        hidden, head_dim = config.hidden_size, config.head_dim
        query = config.num_attention_heads * head_dim
        rows = query + 2 * config.num_key_value_heads * head_dim
        stddev = config.initializer_range
        self.input_norm = nnx.Param(jnp.ones((layers, hidden), param_dtype))
        self.qkv_proj = normal_param(rngs, (layers, rows, hidden), stddev, param_dtype)
        self.o_proj = normal_param(rngs, (layers, hidden, query), stddev, param_dtype)
        bias, norm = config.qkv_bias, config.qk_norm
        self.qkv_bias = nnx.Param(jnp.zeros((layers, rows), param_dtype)) if bias else None
        self.q_norm = nnx.Param(jnp.ones((layers, head_dim), param_dtype)) if norm else None
        self.k_norm = nnx.Param(jnp.ones((layers, head_dim), param_dtype)) if norm else None
        self.config = config

    def project(
        self, x_BTH: Array, span: Span, recipes: LayerRecipes, quantized: QuantizedLayer
    ) -> tuple[Array, Array, Array]:
        """q [B, T, Q, D], k and v [B, T, G, D], normalised and rotated to their positions."""
        config = self.config
        batch, tokens, _ = x_BTH.shape
        eps, head_dim = config.rms_norm_eps, config.head_dim
        qkv = jaxfp4.linear(
            x_BTH,
            self.qkv_proj[...],
            recipes.qkv_proj,
            quantized=quantized.qkv_proj,
            front=jaxfp4.RMSNorm(self.input_norm[...], eps),
        )
        if self.qkv_bias is not None:
            bias = self.qkv_bias[...].astype(qkv.dtype)
            qkv = jaxfp4.residual_add(qkv, jnp.broadcast_to(bias, qkv.shape))
        qkv = qkv.reshape(batch, tokens, -1, head_dim)
        query, key = config.num_attention_heads, config.num_key_value_heads
        q, k, v = jnp.split(qkv, (query, query + key), axis=2)
        inv_freq = inverse_frequencies(config)
        q_norm = None if self.q_norm is None else self.q_norm[...]
        k_norm = None if self.k_norm is None else self.k_norm[...]
        q = jaxfp4.qk_norm_rope(q, q_norm, span.position, inv_freq, eps=eps)
        k = jaxfp4.qk_norm_rope(k, k_norm, span.position, inv_freq, eps=eps)
        return q, k, v

    def attend(
        self,
        q_BTQD: Array,
        k_BSGD: Array,
        v_BSGD: Array,
        span: Span,
        recipes: LayerRecipes,
        quantized: QuantizedLayer,
    ) -> Array:
        """The attention's addition to the residual stream, [B, T, H]."""
        y = jaxfp4.attention(q_BTQD, k_BSGD, v_BSGD, span.key_start, span.key_end)
        y = y.reshape(*y.shape[:2], -1)
        return jaxfp4.linear(y, self.o_proj[...], recipes.o_proj, quantized=quantized.o_proj)


class DenseMlp(nnx.Module):
    """SwiGLU MLP with its norm: post_norm [L, H], gate_up_proj [L, 2I, H], down_proj [L, H, I]."""

    def __init__(self, config: Qwen3Config, layers: int, *, param_dtype, rngs: nnx.Rngs):
        hidden, inner, stddev = (
            config.hidden_size,
            config.intermediate_size,
            config.initializer_range,
        )
        self.post_norm = nnx.Param(jnp.ones((layers, hidden), param_dtype))
        self.gate_up_proj = normal_param(rngs, (layers, 2 * inner, hidden), stddev, param_dtype)
        self.down_proj = normal_param(rngs, (layers, hidden, inner), stddev, param_dtype)
        self.eps = config.rms_norm_eps

    def __call__(self, x_BTH: Array, recipes: LayerRecipes, quantized: QuantizedLayer) -> Array:
        """The MLP's addition to the residual stream, [B, T, H]."""
        gate_up = jaxfp4.linear(
            x_BTH,
            self.gate_up_proj[...],
            recipes.gate_up_proj,
            quantized=quantized.gate_up_proj,
            front=jaxfp4.RMSNorm(self.post_norm[...], self.eps),
        )
        return jaxfp4.linear(
            gate_up,
            self.down_proj[...],
            recipes.down_proj,
            quantized=quantized.down_proj,
            front=jaxfp4.SwiGLU(),
        )


def inverse_frequencies(config: Qwen3Config) -> Array:
    """RoPE's angle per position for each rotated pair, f32[D / 2] (arXiv:2104.09864).

    Computed on the host: the same bits in every program, whatever XLA makes of a power.
    """
    exponent = np.arange(0, config.head_dim, 2) / config.head_dim
    return jnp.asarray(config.rope_theta**-exponent, jnp.float32)
