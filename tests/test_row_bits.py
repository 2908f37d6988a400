"""A row has the same bits whatever the other rows, their number and order, and the context.

Bytes are compared. Each op runs once on 300 rows outside of any transformation, and every other way
of running it must give each row what that run gave it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from row_ops import ROW_OPS, RowOp
from tolerances import assert_close

ROWS = 300
every_op = pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)


def as_bytes(results) -> list[np.ndarray]:
    """Each result as uint8 [rows, bytes of a row]."""
    return [
        np.ascontiguousarray(r).reshape(r.shape[0], -1).view(np.uint8)
        for r in map(np.asarray, jax.tree.leaves(results))
    ]


@functools.cache
def run_of_all(op: RowOp):
    rows = op.rows(np.random.default_rng(3), ROWS)
    return rows, as_bytes(op.apply(*rows, *op.shared))


def assert_rows(op: RowOp, results, chosen) -> None:
    for actual, expected in zip(as_bytes(results), run_of_all(op)[1], strict=True):
        np.testing.assert_array_equal(actual, expected[chosen])


@every_op
@settings(max_examples=4, deadline=None, derandomize=True)
@example(count=1, seed=0)  # XLA has kernels of their own for one row
@example(count=ROWS, seed=0)
@given(count=st.integers(1, ROWS), seed=st.integers(0, 2**32 - 1))
def test_batches_of_any_size_and_order(op, count, seed):
    rows, _ = run_of_all(op)
    chosen = np.random.default_rng(seed).choice(ROWS, count, replace=False)
    batch = [np.asarray(row)[chosen] for row in rows]
    assert_rows(op, jax.jit(op.apply)(*batch, *op.shared), chosen)


def _chunks(rows, count):
    return tuple(row.reshape(count, row.shape[0] // count, *row.shape[1:]) for row in rows)


def _join(results):
    return jax.tree.map(lambda r: r.reshape(math.prod(r.shape[:2]), *r.shape[2:]), results)


def in_scan(op, *rows):
    def body(_, chunk):
        return None, op.apply(*chunk, *op.shared)

    return _join(jax.lax.scan(body, None, _chunks(rows, 4))[1])


def in_vmap(op, *rows):
    return _join(jax.vmap(lambda *chunk: op.apply(*chunk, *op.shared))(*_chunks(rows, 3)))


def in_vmap_of_vmap(op, *rows):
    def inner(*chunk):
        return jax.vmap(lambda *row: op.apply(*row, *op.shared))(*_chunks(chunk, 5))

    return _join(_join(jax.vmap(inner)(*_chunks(rows, 3))))


def in_grad_of_remat(op, *rows):
    """What the rematerialised forward of a gradient computed, scanned as layers are."""

    def loss(first, others):
        results = jax.checkpoint(op.apply)(first, *others, *op.shared)
        total = sum(
            r.astype(jnp.float32).sum()
            for r in jax.tree.leaves(results)
            if jnp.issubdtype(r.dtype, jnp.floating)
        )
        return total, results

    def body(_, chunk):
        gradient, results = jax.grad(loss, has_aux=True)(chunk[0], chunk[1:])
        return None, (gradient, results)

    _, (_, results) = jax.lax.scan(body, None, _chunks(rows, 2))
    return _join(results)


@every_op
@pytest.mark.parametrize("context", [in_scan, in_vmap, in_vmap_of_vmap, in_grad_of_remat])
def test_contexts(op, context):
    rows, _ = run_of_all(op)
    assert_rows(op, jax.jit(functools.partial(context, op))(*rows), slice(None))


@every_op
def test_no_rows(op):
    results = op.apply(*op.rows(np.random.default_rng(0), 0), *op.shared)
    assert all(r.shape[0] == 0 for r in jax.tree.leaves(results))


@every_op
def test_shard_map(op):
    """Rows sharded over 8 devices: the same bits, and a shared operand's gradient summed."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = tuple(row[:296] for row in run_of_all(op)[0])

    def value_and_gradients(first, others, shared):
        def loss(first, shared):
            results = op.apply(first, *others, *shared)
            floats = [r for r in jax.tree.leaves(results) if jnp.issubdtype(r.dtype, jnp.floating)]
            return sum(jnp.sin(r.astype(jnp.float32)).sum() for r in floats), results

        return jax.grad(loss, (0, 1), has_aux=True)(first, shared)

    sharded = jax.shard_map(
        value_and_gradients,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P()),
        out_specs=((P("data"), P()), P("data")),
    )
    (d_first, d_shared), results = jax.jit(sharded)(rows[0], rows[1:], op.shared)
    assert_rows(op, results, slice(296))
    expected_first, expected_shared = value_and_gradients(rows[0], rows[1:], op.shared)[0]
    for actual, expected in zip(
        (d_first, *d_shared), (expected_first, *expected_shared), strict=True
    ):
        suffix = "bf16" if actual.dtype == jnp.bfloat16 else "fp32"
        assert_close(actual, expected, f"sharded_grad_{suffix}")
