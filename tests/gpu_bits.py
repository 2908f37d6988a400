"""Running one op on the CPU and on a GPU and comparing the bytes, for the tests marked `gpu`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

both_dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])


def _gpu() -> Any:
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


GPU = _gpu()
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPU is None, reason="JAX finds no CUDA device"),
]


def _run(device: Any, op: Callable[..., Any], *operands: Any) -> Any:
    results = jax.jit(op)(*jax.device_put(operands, device))
    for leaf in jax.tree.leaves(results):
        assert leaf.devices() == {device}
    return jax.tree.map(np.asarray, results)


def on_gpu(op: Callable[..., Any], *operands: Any) -> Any:
    """The results of op under jit on the GPU, as NumPy arrays."""
    return _run(GPU, op, *operands)


def on_cpu(op: Callable[..., Any], *operands: Any) -> Any:
    """The results of op under jit on the CPU, as NumPy arrays."""
    return _run(jax.devices("cpu")[0], op, *operands)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Asserts that trees of arrays have the same bytes, any NaN being equal to any other."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        bits = np.uint16 if a.itemsize == 2 else np.uint32
        nan = np.isnan(a.astype(np.float32)) & np.isnan(e.astype(np.float32))
        wrong = np.argwhere((a.view(bits) != e.view(bits)) & ~nan)
        if len(wrong):
            first = tuple(wrong[0])
            raise AssertionError(
                f"{len(wrong)} of {a.size} differ, first at {first}: {a[first]!r} "
                f"({a.view(bits)[first]:#x}), expected {e[first]!r} ({e.view(bits)[first]:#x})"
            )


def assert_same_on_both(op: Callable[..., Any], *operands: Any) -> None:
    """Asserts that op gives the GPU's bytes on the CPU."""
    assert_same_bits(on_gpu(op, *operands), on_cpu(op, *operands))


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal values of several magnitudes, with zeros of both signs and subnormals among them."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)
    kind = rng.random(shape)
    x = np.where(kind < 0.02, rng.choice([0.0, -0.0], shape), x)
    x = np.where((kind > 0.02) & (kind < 0.04), rng.uniform(-(2.0**-126), 2.0**-126, shape), x)
    return jnp.asarray(x.astype(np.float32)).astype(dtype)


def spoiled(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`values` of which some rows hold NaN or infinities, or are all tiny, huge or zero."""
    x = np.array(values(rng, shape, jnp.float32)).reshape(-1, shape[-1])
    for row in range(len(x)):
        column = rng.integers(0, shape[-1])
        match row % 16:
            case 1:
                x[row, column] = np.nan
            case 3:
                x[row, column] = np.inf
            case 5:
                x[row, column] = -np.inf
            case 7:
                x[row] *= np.float32(2.0**-120)
            case 9:
                x[row] *= np.float32(2.0**115)
            case 11:
                x[row] = 0 * x[row]
            case 13:
                x[row] *= np.float32(2.0**-60)
    return jnp.asarray(x.reshape(shape)).astype(dtype)
