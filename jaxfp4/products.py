"""The matrix products behind linear and grouped_linear, as custom calls with batching rules.

    matmul          y[i, j]     = sum_k a[i, k] b[j, k]          times scale_b, then scale_a
    matmul_dx       dx[i, k]    = sum_n g[i, n] w[n, k]
    matmul_dw       dw[n, k]    = sum_i g[i, n] x[i, k]

and the same over groups, where row i belongs to the group that `group_sizes` puts it in and b, w
and dw have a leading axis of groups. a and b are arrays, or Fp4Array, whose codes times block
scales are exact and whose fp32 scales multiply the fp32 sum before its one rounding. Each element
is one sum in index order: a row's bits depend on that row and on b alone.

Under `vmap` a dense product folds the batch into its rows, or into groups where the weight is
batched too; a grouped product folds it into groups.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfp4.array import Fp4Array
from jaxfp4.batching import batching_rule, broadcast, merge, unfold
from jaxfp4.custom_calls import absent, call, match_varying

Operand = jax.Array | Fp4Array

_WORKSPACE_PER_GROUP = 256  # bytes: pointers, strides and sizes of a group's problem


def _workspace(groups: int) -> tuple[tuple[int, ...], Any]:
    return (groups * _WORKSPACE_PER_GROUP,), jnp.uint8


def _flat(operand: Operand) -> tuple[jax.Array, ...]:
    """The operand's arrays in the order of the custom calls, its fp32 scale flat."""
    if isinstance(operand, Fp4Array):
        return operand.codes, operand.block_scales, operand.scale.reshape(-1)
    return (operand,)


def _per_row(parts: list[jax.Array], rows: int) -> list[jax.Array]:
    """[B, ...] parts of an Fp4Array with one scale a row: elements of a batch differ in theirs."""
    *values, scale = parts
    return [*values, jnp.broadcast_to(scale, (scale.shape[0], rows))] if values else parts


def matmul(a: Operand, b: Operand, dtype: Any) -> jax.Array:
    """y [M, N] = a [M, K] times b [N, K] transposed, both arrays or both Fp4Array."""
    quantized = isinstance(a, Fp4Array)
    run = _matmul(quantized, jnp.dtype(dtype))
    return run(*match_varying(*_flat(a), *_flat(b)))


@functools.cache
def _matmul(quantized: bool, dtype: Any) -> Any:
    parts = 3 if quantized else 1

    @custom_vmap
    def run(*operands):
        a, b = operands[:parts], operands[parts:]
        result = [((a[0].shape[0], b[0].shape[0]), dtype)]
        if quantized:
            return call("nvfp4_matmul", result, *a, *b)[0]
        return call("matmul", result, *a, *b, absent(jnp.float32), absent(jnp.float32))[0]

    @batching_rule(run)
    def _(size, batched, *operands):
        a, b = operands[:parts], operands[parts:]
        m, n = a[0].shape[-2], b[0].shape[-2]
        a = [merge(part) for part in _per_row(broadcast(size, batched[:parts], a), m)]
        if any(batched[parts:]):
            *values, last = broadcast(size, batched[parts:], b)
            b = [*values, last.reshape(-1) if quantized else last]
            sizes = jnp.full((size,), m, jnp.int32)
            y = _grouped_matmul(quantized, dtype)(*match_varying(*a, *b, sizes))
        else:
            y = run(*a, *b)
        return y.reshape(size, m, n), True

    return run


def grouped_matmul(a: Operand, b: Operand, group_sizes: jax.Array, dtype: Any) -> jax.Array:
    """y [M, N] = a [M, K] times its group's b [G, N, K] transposed; zero past the last group."""
    run = _grouped_matmul(isinstance(a, Fp4Array), jnp.dtype(dtype))
    return run(*match_varying(*_flat(a), *_flat(b), group_sizes))


@functools.cache
def _grouped_matmul(quantized: bool, dtype: Any) -> Any:
    parts = 3 if quantized else 1

    @custom_vmap
    def run(*operands):
        a, b, sizes = operands[:parts], operands[parts:-1], operands[-1]
        groups, n = b[0].shape[:2]
        results = [((a[0].shape[0], n), dtype), _workspace(groups)]
        if quantized:
            return call("nvfp4_grouped_matmul", results, *a, *b, sizes)[0]
        none = absent(jnp.float32)
        return call("grouped_matmul", results, *a, *b, none, none, sizes)[0]

    @batching_rule(run)
    def _(size, batched, *operands):
        operands = broadcast(size, batched, operands)
        a, b, sizes = operands[:parts], operands[parts:-1], operands[-1]
        m = a[0].shape[1]
        a = [merge(part) for part in _per_row(a, m)]
        y = run(*a, *map(merge, b), _whole_groups(sizes, m))
        return _zero_unused(unfold(size, y), sizes), True

    return run


def _whole_groups(sizes: jax.Array, rows: int) -> jax.Array:
    """[B, G] group sizes as [B * G], each element's last group taking its unused rows."""
    unused = rows - sizes.sum(axis=1, dtype=jnp.int32)
    # Sizes that are not legal stay so, for the handler to refuse.
    legal = (unused >= 0) & (sizes >= 0).all(axis=1)
    last = jnp.where(legal, sizes[:, -1] + unused, -1)
    return sizes.at[:, -1].set(last).reshape(-1)


def _zero_unused(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """[B, M, ...] with zeros in the rows past the sum of each element's group sizes."""
    sums = sizes.sum(axis=1, keepdims=True, dtype=jnp.int32)
    used = jnp.arange(rows.shape[1], dtype=jnp.int32) < sums
    return jnp.where(used[..., None], rows, jnp.zeros((), rows.dtype))


def matmul_dx(g: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """dx [M, K] = g [M, N] times w [N, K]."""
    return _matmul_dx(jnp.dtype(dtype))(*match_varying(g, w))


@functools.cache
def _matmul_dx(dtype: Any) -> Any:
    @custom_vmap
    def run(g, w):
        return call("matmul_dx", [((g.shape[0], w.shape[1]), dtype)], g, w)[0]

    @batching_rule(run)
    def _(size, batched, g, w):
        if not batched[1]:
            return unfold(size, run(merge(g), w)), True
        g, w = broadcast(size, batched, (g, w))
        sizes = jnp.full((size,), g.shape[1], jnp.int32)
        return unfold(size, grouped_matmul_dx(merge(g), w, sizes, dtype)), True

    return run


def grouped_matmul_dx(g: jax.Array, w: jax.Array, group_sizes: jax.Array, dtype: Any) -> jax.Array:
    """dx [M, K] = g [M, N] times its group's w [G, N, K]; zero past the last group."""
    return _grouped_matmul_dx(jnp.dtype(dtype))(*match_varying(g, w, group_sizes))


@functools.cache
def _grouped_matmul_dx(dtype: Any) -> Any:
    @custom_vmap
    def run(g, w, sizes):
        results = [((g.shape[0], w.shape[2]), dtype), _workspace(w.shape[0])]
        return call("grouped_matmul_dx", results, g, w, sizes)[0]

    @batching_rule(run)
    def _(size, batched, g, w, sizes):
        g, w, sizes = broadcast(size, batched, (g, w, sizes))
        m = g.shape[1]
        dx = run(merge(g), merge(w), _whole_groups(sizes, m))
        return _zero_unused(unfold(size, dx), sizes), True

    return run


def matmul_dw(g: jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """dw [N, K] = g [M, N] transposed times x [M, K], summed in fp32."""
    return _matmul_dw(jnp.dtype(dtype))(*match_varying(g, x))


@functools.cache
def _matmul_dw(dtype: Any) -> Any:
    @custom_vmap
    def run(g, x):
        return call("matmul_dw", [((g.shape[1], x.shape[1]), dtype)], g, x)[0]

    @batching_rule(run)
    def _(size, batched, g, x):
        g, x = broadcast(size, batched, (g, x))
        sizes = jnp.full((size,), g.shape[1], jnp.int32)
        return grouped_matmul_dw(merge(g), merge(x), sizes, dtype), True

    return run


def grouped_matmul_dw(g: jax.Array, x: jax.Array, group_sizes: jax.Array, dtype: Any) -> jax.Array:
    """dw [G, N, K] = each group's g [M, N] transposed times x [M, K]; zero for an empty group."""
    return _grouped_matmul_dw(jnp.dtype(dtype))(*match_varying(g, x, group_sizes))


@functools.cache
def _grouped_matmul_dw(dtype: Any) -> Any:
    @custom_vmap
    def run(g, x, sizes):
        groups = sizes.shape[0]
        results = [((groups, g.shape[1], x.shape[1]), dtype), _workspace(groups)]
        return call("grouped_matmul_dw", results, g, x, sizes)[0]

    @batching_rule(run)
    def _(size, batched, g, x, sizes):
        g, x, sizes = broadcast(size, batched, (g, x, sizes))
        # An element's unused rows would fall into its last group: they add zeros there.
        g, x = _zero_unused(g, sizes), _zero_unused(x, sizes)
        dw = run(merge(g), merge(x), _whole_groups(sizes, g.shape[1]))
        return unfold(size, dw), True

    return run
