"""The mixture-of-experts MLP of a decoder block, and the record of the experts it chose.

    p = softmax(router @ h) in fp32,  h = rmsnorm(x)
    x += sum over the k experts e of largest p:  w_e * down_e(silu(gate_e) * up_e)

w_e is p_e, divided by the sum over the chosen k where `norm_topk_prob`. The (token, choice) pairs
are sorted by expert, so that each expert's tokens are consecutive rows of one grouped product, and
the k results of a token are added in the order of choice. Dropless: no capacity, no balancing loss.

Padding goes to no expert: its pairs sort behind all experts and are counted in no group.

Shapes: B rows, T tokens, M = B T, k choices, R = M k pairs, E experts, H hidden, I intermediate.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import jaxfp4
from models.config import Qwen3Config
from models.layers import LayerRecipes, QuantizedLayer, normal_param


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routes:
    """The experts that each token was sent to; give it back to a forward pass to replay it.

    layers: i32[L_moe], the decoder layer that each table belongs to.
    experts: i32[L_moe, B, T, k], in falling order of weight; `num_experts` for padding.
    """

    layers: Array
    experts: Array


def check_routes(
    config: Qwen3Config,
    routes: Routes,
    *,
    start: np.ndarray,
    end: np.ndarray,
    offset: int = 0,
) -> None:
    """Refuses recorded routes that are not this model's, before they enter a compiled program.

    start, end (i32[B]) and offset are those of the forward pass. Padding may hold any id.

    Raises ValueError when the tables are not those of the model's mixture-of-experts layers in
    ascending order, have another shape than [L_moe, B, T, k], or send a real token to an expert
    outside [0, E) or twice to the same one.
    """
    layers, experts = np.asarray(routes.layers), np.asarray(routes.experts)
    if layers.tolist() != list(config.moe_layers):
        raise ValueError(
            f"routes belong to layers {layers.tolist()}, the model's mixture-of-experts layers "
            f"are {list(config.moe_layers)} in this order"
        )
    start, end = np.asarray(start), np.asarray(end)
    shape = (len(layers), len(start), *experts.shape[2:3], config.num_experts_per_tok)
    if experts.shape != shape:
        raise ValueError(
            f"routes.experts has shape {experts.shape}, expected [L_moe, B, T, k] = {shape}"
        )
    slot = offset + np.arange(experts.shape[2])[None, :]
    real = (start[:, None] <= slot) & (slot < end[:, None])
    outside = (experts < 0) | (experts >= config.num_experts)
    ordered = np.sort(experts, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    for wrong, reason in (
        (outside.any(-1), f"outside [0, {config.num_experts})"),
        (repeated, "the same expert twice"),
    ):
        found = np.argwhere(wrong & real)
        if len(found):
            layer, row, token = found[0]
            raise ValueError(
                f"routes.experts of layer {layers[layer]}, row {row}, token {token} are "
                f"{experts[layer, row, token].tolist()}: {reason} ({len(found)} such tokens)"
            )


def dispatch(experts_Mk: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """Sorts the (token, choice) pairs by expert, pairs of one expert in the order of tokens.

    An expert outside [0, num_experts) takes no part: it comes last and is in no group.

    Returns rows i32[R], the token of each sorted pair; slots i32[M, k], where each pair is among
    the sorted ones (R for a pair that takes no part); group_sizes i32[E].
    """
    pairs, choices = experts_Mk.size, experts_Mk.shape[-1]
    expert = experts_Mk.reshape(-1)
    routed = (expert >= 0) & (expert < num_experts)
    expert = jnp.where(routed, expert, num_experts)
    order = jnp.argsort(expert, stable=True)
    slots = jnp.zeros_like(expert).at[order].set(jnp.arange(pairs, dtype=expert.dtype))
    slots = jnp.where(routed, slots, pairs).reshape(experts_Mk.shape)
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[expert].add(1, mode="drop")
    return order // choices, slots, group_sizes


class Moe(nnx.Module):
    """Mixture of SwiGLU experts with its norm: post_norm [L, H], router [L, E, H],
    gate_up_proj [L, E, 2I, H], down_proj [L, E, H, I]."""

    def __init__(self, config: Qwen3Config, layers: int, *, param_dtype, rngs: nnx.Rngs):
        hidden, inner, experts = (
            config.hidden_size,
            config.moe_intermediate_size,
            config.num_experts,
        )
        stddev = config.initializer_range
        self.post_norm = nnx.Param(jnp.ones((layers, hidden), param_dtype))
        self.router = normal_param(rngs, (layers, experts, hidden), stddev, param_dtype)
        self.gate_up_proj = normal_param(
            rngs, (layers, experts, 2 * inner, hidden), stddev, param_dtype
        )
        self.down_proj = normal_param(rngs, (layers, experts, hidden, inner), stddev, param_dtype)
        self.config = config

    def __call__(
        self,
        x_BTH: Array,
        real_BT: Array,
        recipes: LayerRecipes,
        quantized: QuantizedLayer,
        replay_BTk: Array | None,
    ) -> tuple[Array, Array]:
        """The experts' addition to the residual stream, [B, T, H], and their ids i32[B, T, k].

        With `replay_BTk` the tokens go to these experts; the weights still come from the router.
        """
        config = self.config
        x = jaxfp4.rmsnorm(x_BTH, self.post_norm[...], eps=config.rms_norm_eps)
        x = x.reshape(-1, x.shape[-1])
        logits = jaxfp4.linear(x, self.router[...], jaxfp4.UNQUANTIZED, out_dtype=jnp.float32)
        choices = config.num_experts_per_tok
        replay = None
        if replay_BTk is not None:
            # The ids of padding are free; the router's weights are to stay finite there too.
            replay = jnp.where(real_BT[..., None], replay_BTk, 0).reshape(-1, choices)
        weights, experts = jaxfp4.router_topk(
            logits, choices, norm_topk_prob=config.norm_topk_prob, experts=replay
        )
        experts = jnp.where(real_BT.reshape(-1, 1), experts, config.num_experts)
        rows, slots, group_sizes = dispatch(experts, config.num_experts)
        gate_up = jaxfp4.grouped_linear(
            x,
            self.gate_up_proj[...],
            group_sizes,
            recipes.gate_up_proj,
            quantized=quantized.gate_up_proj,
            rows=rows,
        )
        y = jaxfp4.grouped_linear(
            gate_up,
            self.down_proj[...],
            group_sizes,
            recipes.down_proj,
            quantized=quantized.down_proj,
            front=jaxfp4.SwiGLU(),
        )
        y = jaxfp4.combine_experts(y, weights, slots)
        return y.reshape(x_BTH.shape), experts.reshape(*real_BT.shape, choices)
