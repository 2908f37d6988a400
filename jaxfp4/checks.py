"""Checks of arguments: what is wrong is said when the op is traced, with its name and value."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxfp4.array import Fp4Array
from jaxfp4.format import BLOCK
from jaxfp4.fronts import Front, RMSNorm, SwiGLU


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


def check_quantizable(name: str, x: jax.Array, depth: int) -> None:
    """Raises unless x is bf16 or fp32 and its quantised width `depth` is a multiple of 16."""
    check_float(name, x)
    if depth == 0 or depth % BLOCK:
        nearest = max(BLOCK, (depth + BLOCK // 2) // BLOCK * BLOCK)
        raise ValueError(
            f"{name} must have a multiple of {BLOCK} values to quantise along its last axis, got "
            f"{depth} in shape {x.shape}; the nearest legal number is {nearest}"
        )


def check_fp4(name: str, q: Fp4Array, shape: tuple[int, ...], scope: str) -> None:
    """Raises unless q is an Fp4Array of this shape and scope whose parts fit together."""
    if not isinstance(q, Fp4Array):
        raise TypeError(f"{name} must be a jaxfp4.Fp4Array, got {type(q).__name__}")
    *rows, depth = shape
    scale_shape = tuple(rows if scope == "row" else rows[:-1])
    if q.shape != shape or q.scale.shape != scale_shape:
        raise ValueError(
            f"{name} has shape {q.shape} and scale {q.scale.shape}, expected shape {shape} and, "
            f"with scope {scope!r}, scale {scale_shape}"
        )
    check_array(f"{name}.codes", q.codes, (*rows, depth // 2), jnp.uint8)
    block_scales = (*rows, depth // BLOCK)
    check_array(f"{name}.block_scales", q.block_scales, block_scales, jnp.float8_e4m3fn)
    check_array(f"{name}.scale", q.scale, scale_shape, jnp.float32)


def check_front(front: Front | None, width: int) -> None:
    """Raises unless `front` is a front that takes rows of `width` values."""
    match front:
        case None:
            pass
        case SwiGLU():
            if width % 2:
                raise ValueError(f"x must have an even number of values for SwiGLU, got {width}")
        case RMSNorm():
            check_float("front.weight", front.weight)
            if front.weight.shape != (width,):
                raise ValueError(
                    f"front.weight must have shape {(width,)}, got {front.weight.shape}"
                )
        case _:
            raise TypeError(f"front must be SwiGLU(), RMSNorm(weight, eps) or None, got {front!r}")
