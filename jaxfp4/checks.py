"""Checks of arguments: what is wrong is said when the op is traced, with its name and value."""

from typing import Any

import jax
import jax.numpy as jnp


def check_float(name: str, x: jax.Array, min_ndim: int = 1) -> None:
    """Raises unless x is bf16 or fp32 and has at least `min_ndim` axes."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(f"{name} must be bfloat16 or float32, got {x.dtype} of shape {x.shape}")
    if x.ndim < min_ndim:
        raise ValueError(f"{name} must have at least {min_ndim} axes, got shape {x.shape}")


def check_array(name: str, x: jax.Array, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises unless x has this shape and dtype."""
    if x.shape != shape or x.dtype != dtype:
        expected = f"{jnp.dtype(dtype).name} of shape {shape}"
        raise ValueError(f"{name} must be {expected}, got {x.dtype} of shape {x.shape}")
