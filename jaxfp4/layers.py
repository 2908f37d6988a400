"""Flax NNX layers over linear and grouped_linear, for users' own modules.

The fp32 masters are `nnx.Param`; what is quantised, and whether anything is, is the recipe's
matter, so a model that changes its recipe keeps its parameters and checkpoints.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfp4.array import Fp4Array
from jaxfp4.fronts import Front
from jaxfp4.grouped_linear import grouped_linear
from jaxfp4.linear import linear
from jaxfp4.policy import NVFP4, Recipe


def _weight(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    """A matrix (out, in), or a stack of them, drawn as by nnx.Linear: with variance 1 / in."""
    initializer = nnx.initializers.variance_scaling(
        1.0,
        "fan_in",
        "truncated_normal",
        in_axis=-1,
        out_axis=-2,
        batch_axis=tuple(range(len(shape) - 2)),
    )
    return nnx.Param(initializer(rngs.params(), shape, jnp.float32))


class Linear(nnx.Module):
    """x [..., in_features] to [..., out_features] under a recipe; no bias.

    Args:
      in_features: a multiple of 16 if the recipe quantises.
      out_features: any.
      recipe: how the product is quantised.
      rngs: for the initial weight, fp32 [out_features, in_features].
    """

    def __init__(
        self, in_features: int, out_features: int, recipe: Recipe = NVFP4, *, rngs: nnx.Rngs
    ):
        self.weight = _weight(rngs, out_features, in_features)
        self.recipe = recipe

    def __call__(
        self, x: jax.Array, *, quantized: Fp4Array | None = None, front: Front | None = None
    ) -> jax.Array:
        return linear(x, self.weight[...], self.recipe, quantized=quantized, front=front)


class GroupedLinear(nnx.Module):
    """Rows of x [M, in_features], sorted by group, to [M, out_features] by each group's weight.

    Args:
      groups: the number of weights, such as experts.
      in_features, out_features, recipe, rngs: as in Linear, for each of the groups.
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        recipe: Recipe = NVFP4,
        *,
        rngs: nnx.Rngs,
    ):
        self.weight = _weight(rngs, groups, out_features, in_features)
        self.recipe = recipe

    def __call__(
        self,
        x: jax.Array,
        group_sizes: jax.Array,
        *,
        quantized: Fp4Array | None = None,
        front: Front | None = None,
        rows: jax.Array | None = None,
    ) -> jax.Array:
        weight = self.weight[...]
        return grouped_linear(
            x, weight, group_sizes, self.recipe, quantized=quantized, front=front, rows=rows
        )
