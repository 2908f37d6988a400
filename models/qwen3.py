"""Qwen3, dense and mixture-of-experts, as one decoder over stacked parameters.

    x = embed[tokens];  for each block: x += attention(x); x += mlp(x);  hidden = rmsnorm(x)

The parameters of all layers of one kind (attention, dense MLP, mixture of experts) are one stack
each, whatever the recipe. The forward scans the maximal runs of layers that have equal kind and
equal recipes, so compile time does not grow with depth, and a change of recipe recompiles but
leaves every checkpoint valid.

One computation serves decoding, prefill, scoring and training: every sum along a row goes through
an op with a fixed order, so a token's bits do not depend on how the call was cut (see `jaxfp4`).
XLA is left with gathers, single additions that are really rounded, and selections.

Tokens are addressed by slot, the place in the row's buffer. Row b's real tokens are the slots
start[b] <= s < end[b] at position s - start[b], so padding may be left or right. Padding has zero
hidden states, gives no gradient and goes to no expert.

Shapes: B rows, T tokens of this call, S cache slots, L layers, H hidden, V vocabulary, D head dim.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.core import Tracer

import jaxfp4
from jaxfp4.format import BLOCK
from models.cache import Cache, empty, read, write
from models.config import Qwen3Config
from models.layers import (
    Attention,
    DenseMlp,
    LayerRecipes,
    QuantizedLayer,
    Span,
    normal_param,
)
from models.moe import Moe, Routes


class Output(NamedTuple):
    """hidden: [B, T, H] after the final norm, zero at padding. cache: the one given, with this
    call's keys and values written. routes: the experts chosen, None for a dense model."""

    hidden: Array
    cache: Cache | None
    routes: Routes | None


class Run(NamedTuple):
    """Consecutive layers of one kind with equal recipes, which one scan computes.

    They are the layers first <= i < last, and in the stack of their MLP kind the entries from
    `mlp_first` on.
    """

    first: int
    last: int
    mlp_first: int
    moe: bool
    recipes: LayerRecipes


def layer_names(config: Qwen3Config, layer: int) -> tuple[str, str, str, str]:
    """The names that a `jaxfp4.Policy` matches for the four products of a layer."""
    mlp = "mlp.experts" if config.is_moe(layer) else "mlp"
    return (
        f"layers.{layer}.self_attn.qkv_proj",
        f"layers.{layer}.self_attn.o_proj",
        f"layers.{layer}.{mlp}.gate_up_proj",
        f"layers.{layer}.{mlp}.down_proj",
    )


def find_runs(config: Qwen3Config, policy: jaxfp4.Policy) -> tuple[Run, ...]:
    """Cuts the layers into maximal runs of equal kind and recipes.

    Raises ValueError where a quantised product has a row that is no multiple of 16, and what
    `Policy.check_used` raises for a rule that matches no layer.
    """
    policy.check_used([n for i in range(config.num_hidden_layers) for n in layer_names(config, i)])
    runs: list[Run] = []
    seen = {False: 0, True: 0}
    for layer in range(config.num_hidden_layers):
        moe, names = config.is_moe(layer), layer_names(config, layer)
        recipes = LayerRecipes(*(policy.recipe_for(name) for name in names))
        inner = config.moe_intermediate_size if moe else config.intermediate_size
        heads = config.num_attention_heads * config.head_dim
        for name, recipe, row in zip(
            names, recipes, (config.hidden_size, heads, config.hidden_size, inner), strict=True
        ):
            if recipe != jaxfp4.UNQUANTIZED and row % BLOCK:
                raise ValueError(
                    f"{name} has rows of {row} values; a quantised product needs a multiple of "
                    f"{BLOCK}. Leave it unquantised in the policy"
                )
        if runs and (runs[-1].moe, runs[-1].recipes) == (moe, recipes):
            runs[-1] = runs[-1]._replace(last=layer + 1)
        else:
            runs.append(Run(layer, layer + 1, seen[moe], moe, recipes))
        seen[moe] += 1
    return tuple(runs)


class Qwen3(nnx.Module):
    """A Qwen3 policy.

    Args:
        config: its shape.
        policy: the recipe of every linear layer, by name (`layer_names`). The router, embedding
            and head are never quantised.
        dtype: of the residual stream and the cache; float32 under an unquantised policy computes
            everything in fp32, which is how the model is held against an fp32 reference.
        param_dtype: of the parameters; float32 masters for training.
        remat: "block" keeps only each block's input for the backward pass and computes the block
            again there; "none" keeps what the derivatives need.
        rngs: `params` stream for the initial values, N(0, initializer_range^2), norms 1.

    Used functionally: `graphdef, params = nnx.split(model, nnx.Param)` and, in a jitted function,
    `nnx.merge(graphdef, params)`.
    """

    def __init__(
        self,
        config: Qwen3Config,
        policy: jaxfp4.Policy,
        *,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        remat: Literal["none", "block"] = "none",
        rngs: nnx.Rngs,
    ):
        if remat not in ("none", "block"):
            raise ValueError(f"remat={remat!r} is not one of 'none', 'block'")
        self.config = config
        self.runs = find_runs(config, policy)
        self.dtype = jnp.dtype(dtype)
        self.remat = remat
        shape, stddev = (config.vocab_size, config.hidden_size), config.initializer_range
        self.embed_tokens = normal_param(rngs, shape, stddev, param_dtype)

        def stack(kind: type, layers: int) -> Any:
            if layers == 0:
                return None
            return kind(config, layers, param_dtype=param_dtype, rngs=rngs)

        self.attention = stack(Attention, config.num_hidden_layers)
        self.dense_mlp = stack(DenseMlp, len(config.dense_layers))
        self.moe = stack(Moe, len(config.moe_layers))
        self.norm = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else normal_param(rngs, shape, stddev, param_dtype)

    def prepare(self) -> tuple[QuantizedLayer, ...]:
        """The quantised weights of every run, stacked over its layers; None where unquantised.

        Made once per update: the sampler and every pass of the learner read these same bytes.
        """
        return tuple(
            QuantizedLayer(
                *(
                    jaxfp4.prepare(weight[...], recipe)
                    for weight, recipe in zip(
                        (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj),
                        run.recipes,
                        strict=True,
                    )
                )
            )
            for run in self.runs
            for attention, mlp in [self._layers(run)]
        )

    def init_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache for `batch` rows of at most `slots` tokens, padding included."""
        config = self.config
        heads = (config.num_key_value_heads, config.head_dim)
        return empty((config.num_hidden_layers, batch, slots, *heads), self.dtype)

    def __call__(
        self,
        tokens: Array,
        *,
        start: Array,
        end: Array,
        prepared: tuple[QuantizedLayer, ...] | None = None,
        cache: Cache | None = None,
        offset: Array | None = None,
        routes: Routes | None = None,
    ) -> Output:
        """Hidden states of tokens i32[B, T], of which token t is in slot offset + t.

        Args:
            start, end: i32[B]; the slots start <= s < end are real, the others padding, whose
                token ids are free.
            prepared: the result of `prepare`; None quantises the weights in this call.
            cache: keys and values of earlier calls; this call's are added at their slots, and
                attention reads the buffer. With one there is no derivative.
            offset: i32[], the slot of every row's first token; None is 0. Needs a cache, whose
                slots offset + T must not pass.
            routes: experts to replay, as an earlier call chose them. Pass them through
                `check_routes` first.

        Raises ValueError for arguments that do not fit together or do not fit the model.
        """
        self._check(tokens, start, end, prepared, cache, offset, routes)
        first = jnp.int32(0) if offset is None else offset
        slot = (first + jnp.arange(tokens.shape[1], dtype=jnp.int32))[None, :]
        real = (start[:, None] <= slot) & (slot < end[:, None])
        span = Span(
            position=jnp.where(real, slot - start[:, None], 0),
            key_start=jnp.where(real, start[:, None], 0),
            key_end=jnp.where(real, slot + 1, 0),
            first=first,
            real=real,
        )
        # NaN, not a neighbour's row, for a token outside the vocabulary.
        embedding = self.embed_tokens[...].at[jnp.where(real, tokens, 0)]
        embedding = embedding.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        x = jnp.where(real[..., None], _round(embedding, self.dtype), jnp.zeros((), self.dtype))
        chosen = []
        for index, run in enumerate(self.runs):
            replay = None
            if run.moe and routes is not None:
                replay = routes.experts[run.mlp_first : run.mlp_first + run.last - run.first]
            quantized = QuantizedLayer() if prepared is None else prepared[index]
            attention, mlp = self._layers(run)
            layers = jnp.arange(run.first, run.last, dtype=jnp.int32)
            block = _block(run, span)
            if self.remat == "block":
                # Under scan nothing can be shared across the barrier that prevent_cse adds.
                block = jax.checkpoint(block, prevent_cse=False)
            (x, cache), experts = jax.lax.scan(
                block, (x, cache), (attention, mlp, quantized, replay, layers)
            )
            if run.moe:
                chosen.append(experts)
        hidden = jaxfp4.rmsnorm(x, self.norm[...], eps=self.config.rms_norm_eps)
        # Padding is zero already; the selection stops its cotangents, which may be NaN.
        hidden = jnp.where(real[..., None], hidden, jnp.zeros((), hidden.dtype))
        if chosen:
            layers = jnp.asarray(self.config.moe_layers, jnp.int32)
            routes = Routes(layers, jnp.concatenate(chosen))
        return Output(hidden, cache, routes)

    def logits(self, hidden: Array) -> Array:
        """f32[..., V] from hidden states [..., H]; the head is not quantised."""
        return jaxfp4.linear(hidden, self._head(), jaxfp4.UNQUANTIZED, out_dtype=jnp.float32)

    def token_logprob(
        self, hidden: Array, tokens: Array, *, temperature: float | Array = 1.0
    ) -> tuple[Array, Array]:
        """Log-probability of tokens i32[...] under softmax(logits / temperature), and its
        entropy, f32[...] each, without holding the logits."""
        return jaxfp4.token_logprob(hidden, self._head(), tokens, temperature=temperature)

    def _head(self) -> Array:
        return (self.embed_tokens if self.lm_head is None else self.lm_head)[...]

    def _layers(self, run: Run) -> tuple[Attention, DenseMlp | Moe]:
        """The attention and MLP stacks of a run."""

        def part(module: Any, first: int) -> Any:
            return jax.tree.map(lambda p: p[first : first + run.last - run.first], module)

        mlp = self.moe if run.moe else self.dense_mlp
        return part(self.attention, run.first), part(mlp, run.mlp_first)

    def _check(self, tokens, start, end, prepared, cache, offset, routes) -> None:
        if tokens.ndim != 2:
            raise ValueError(f"tokens has shape {tokens.shape}, expected [B, T]")
        rows = tokens.shape[:1]
        for name, value in (("start", start), ("end", end)):
            if value.shape != rows:
                raise ValueError(f"{name} has shape {value.shape}, expected [B] = {rows}")
        if offset is not None:
            if cache is None:
                raise ValueError("offset is given without a cache that holds the earlier slots")
            if offset.shape != ():
                raise ValueError(f"offset has shape {offset.shape}, expected one slot for all rows")
        if cache is not None:
            if cache.rows != rows[0]:
                raise ValueError(f"cache holds {cache.rows} rows, tokens has {rows[0]}")
            # A traced offset has no value to check.
            first = 0 if offset is None or isinstance(offset, Tracer) else int(offset)
            if not 0 <= first <= cache.slots - tokens.shape[1]:
                raise ValueError(
                    f"offset={first}: {tokens.shape[1]} tokens from there do not lie within the "
                    f"cache's {cache.slots} slots"
                )
        if prepared is not None and len(prepared) != len(self.runs):
            raise ValueError(
                f"prepared has {len(prepared)} runs of layers, the model {len(self.runs)}: it was "
                "made by a model of another config or policy"
            )
        if routes is None:
            return
        if not self.config.moe_layers:
            raise ValueError("routes is given to a model without mixture-of-experts layers")
        expected = (len(self.config.moe_layers), *tokens.shape, self.config.num_experts_per_tok)
        if routes.experts.shape != expected:
            raise ValueError(f"routes has shape {routes.experts.shape}, expected {expected}")


def _block(run: Run, span: Span) -> Callable:
    """The scan body: one decoder block of a run."""

    def block(carry: tuple[Array, Cache | None], layer: tuple) -> tuple[tuple, Array | None]:
        x, cache = carry
        attention, mlp, quantized, replay, index = layer
        q, k, v = attention.project(x, span, run.recipes, quantized)
        if cache is not None:
            cache = write(cache, index, k, v, span.first, span.real)
            k, v = read(cache, index, x.dtype)
        y = attention.attend(q, k, v, span, run.recipes, quantized)
        x = jaxfp4.residual_add(x, y)
        experts = None
        if run.moe:
            y, experts = mlp(x, span.real, run.recipes, quantized, replay)
        else:
            y = mlp(x, run.recipes, quantized)
        return (jaxfp4.residual_add(x, y), cache), experts

    return block


def _round(x: Array, dtype: Any) -> Array:
    """x in dtype, really rounded: XLA may keep the excess precision of a plain conversion."""
    info = jnp.finfo(dtype)
    x = jax.lax.reduce_precision(x.astype(jnp.float32), info.nexp, info.nmant)
    return x.astype(dtype)
