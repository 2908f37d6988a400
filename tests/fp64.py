"""Values and gradients of a plain formula in fp64: the oracle of ops that have no exact answer."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def value_and_gradients(
    function: Callable[..., Any], operands: Sequence[Any], cotangents: Any
) -> tuple[Any, tuple[Any, ...]]:
    """function(*operands) and its gradients for these cotangents, all as fp64 NumPy arrays."""
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in operands]
        wide_cotangents = jax.tree.map(lambda x: np.asarray(x, np.float64), cotangents)

        @jax.jit
        def run(operands, cotangents):
            value, pull = jax.vjp(function, *operands)
            return value, pull(cotangents)

        return jax.tree.map(np.asarray, run(wide, wide_cotangents))


def op_value_and_gradients(
    function: Callable[..., Any], operands: Sequence[Any], cotangents: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The same of an op, in its own dtypes."""

    @jax.jit
    def run(operands, cotangents):
        value, pull = jax.vjp(function, *operands)
        cast = jax.tree.map(lambda c, v: c.astype(v.dtype), cotangents, value)
        return value, pull(cast)

    return run(list(operands), jax.tree.map(jnp.asarray, cotangents))
