"""The ops under vmap, grad of vmap, scan, remat and shard_map: equal to plain calls."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from product_cases import RECIPES, assert_same_bits, f64, normal

import jaxfp4

P = PartitionSpec
SIZES = np.array([[5, 0, 7], [2, 2, 2], [0, 0, 16]], np.int32)


def loss(y: jax.Array) -> jax.Array:
    # Elementwise: a sum over all would have XLA's order.
    return y * y


def dense(recipe, x, w):
    y, pullback = jax.vjp(lambda x, w: jaxfp4.linear(x, w, recipe), x, w)
    return y, *pullback(loss(y))


def grouped(recipe, x, w, sizes):
    y, pullback = jax.vjp(lambda x, w: jaxfp4.grouped_linear(x, w, sizes, recipe), x, w)
    return y, *pullback(loss(y))


def gathered(recipe, x, w, sizes, rows):
    front = jaxfp4.RMSNorm(jnp.ones(64), 1e-6)
    return jaxfp4.grouped_linear(x, w, sizes, recipe, rows=rows, front=front)


def assert_equals_loop(function, in_axes, operands):
    batched = jax.jit(jax.vmap(function, in_axes))(*operands)
    single = jax.jit(function)
    for i in range(3):
        element = single(
            *(x if axis is None else x[i] for x, axis in zip(operands, in_axes, strict=True))
        )
        for ours, theirs in zip(jax.tree.leaves(batched), jax.tree.leaves(element), strict=True):
            assert_same_bits(ours[i], theirs)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("name", ["nvfp4-dequantized", "weight-by-row", "unquantized"])
def test_vmap_of_linear_and_its_gradient(name, in_axes):
    x = normal(0, (3, 10, 64), jnp.bfloat16)
    w = normal(1, (3, 24, 64))
    operands = tuple(v if axis == 0 else v[0] for v, axis in zip((x, w), in_axes, strict=True))
    assert_equals_loop(functools.partial(dense, RECIPES[name]), in_axes, operands)


@pytest.mark.parametrize("in_axes", [(0, None, 0), (0, 0, 0), (None, None, 0), (0, None, None)])
@pytest.mark.parametrize("name", ["nvfp4-dequantized", "unquantized"])
def test_vmap_of_grouped_linear_and_its_gradient(name, in_axes):
    values = (
        normal(0, (3, 16, 64), jnp.bfloat16),
        normal(1, (3, 3, 24, 64)),
        jnp.asarray(SIZES),
    )
    operands = tuple(v if axis == 0 else v[0] for v, axis in zip(values, in_axes, strict=True))
    assert_equals_loop(functools.partial(grouped, RECIPES[name]), in_axes, operands)


@pytest.mark.parametrize("in_axes", [(0, None, 0, None), (None, None, 0, 0), (0, None, None, 0)])
def test_vmap_of_a_gather(in_axes):
    rows = np.random.default_rng(0).integers(-1, 17, (3, 16))
    values = (
        normal(0, (3, 16, 64), jnp.bfloat16),
        normal(1, (3, 3, 24, 64)),
        jnp.asarray(SIZES),
        jnp.asarray(rows, jnp.int32),
    )
    operands = tuple(v if axis == 0 else v[0] for v, axis in zip(values, in_axes, strict=True))
    assert_equals_loop(functools.partial(gathered, jaxfp4.NVFP4), in_axes, operands)


@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_vmap_of_quantize(scope):
    x = normal(0, (3, 5, 64))
    q = jax.vmap(functools.partial(jaxfp4.quantize, scope=scope))(x)
    jax.tree.map(assert_same_bits, q, jaxfp4.quantize(x, scope))
    amax = jnp.abs(x).max(axis=-1 if scope == "row" else (-2, -1)) * jnp.float32(1.5)
    q = jax.vmap(lambda x, amax: jaxfp4.quantize(x, scope, amax=amax))(x, amax)
    jax.tree.map(assert_same_bits, q, jaxfp4.quantize(x, scope, amax=amax))


ROW, MATRIX = jnp.ones((4, 32)), jnp.ones((16, 32))
ONE_HEAD, EMPTY_RANGE = jnp.ones((1, 3, 2, 16)), jnp.zeros((1, 3), jnp.int32)
FIRST = jnp.zeros(4, jnp.int32)


@pytest.mark.parametrize(
    ("function", "element"),
    [
        (lambda x: jaxfp4.linear(x, MATRIX), ROW),
        (lambda w: jaxfp4.linear(ROW, w), MATRIX),
        (lambda x: jaxfp4.grouped_linear(x, MATRIX[None], jnp.array([3], jnp.int32)), ROW),
        (lambda w: jaxfp4.rmsnorm(ROW, w, eps=1e-6), jnp.ones(32)),
        (jaxfp4.swiglu, ROW),
        (lambda x: jaxfp4.router_topk(x, 2, norm_topk_prob=True)[0], ROW),
        (lambda y: jaxfp4.combine_experts(y, jnp.ones((4, 1)), FIRST[:, None]), ROW),
        (lambda q: jaxfp4.attention(q, q, q, EMPTY_RANGE, EMPTY_RANGE), ONE_HEAD),
        (
            lambda q: jaxfp4.qk_norm_rope(q, None, EMPTY_RANGE, jnp.ones(8), eps=1e-6),
            ONE_HEAD,
        ),
        (lambda x: jaxfp4.logits_logprob(x, FIRST)[0], ROW),
        (lambda x: jaxfp4.token_logprob(x, MATRIX, FIRST)[0], ROW),
    ],
)
def test_vmap_of_nothing_is_empty(function, element):
    nothing = jnp.zeros((0, *element.shape))
    results = jax.vmap(lambda x: jax.vjp(function, x)[0])(nothing)
    assert results.shape == (0, *function(element).shape)
    gradient = jax.vmap(jax.grad(lambda x: function(x).sum()))(nothing)
    assert gradient.shape == nothing.shape


def test_vmap_of_quantizing_nothing_is_empty():
    q = jax.vmap(jaxfp4.quantize)(jnp.zeros((0, 4, 32)))
    assert (q.shape, q.scale.shape) == ((0, 4, 32), (0, 4))


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_layers_equals_a_loop(remat):
    x, ws = normal(0, (9, 64), jnp.bfloat16), normal(1, (3, 64, 64))

    def plain(x, w):
        return jnp.tanh(jaxfp4.linear(x, w))

    layer = jax.checkpoint(plain) if remat else plain

    @jax.jit
    def scanned(x, ws):
        return jax.vjp(
            lambda x, ws: jax.lax.scan(lambda h, w: (layer(h, w), None), x, ws)[0], x, ws
        )

    @jax.jit
    def looped(x, ws):
        return jax.vjp(lambda x, ws: functools.reduce(layer, ws, x), x, ws)

    (y, pullback), (y_loop, pullback_loop) = scanned(x, ws), looped(x, ws)
    assert_same_bits(y, y_loop)
    g = normal(2, y.shape, jnp.bfloat16)
    for ours, theirs in zip(pullback(g), pullback_loop(g), strict=True):
        # tanh's derivative is XLA's, fused differently.
        np.testing.assert_allclose(f64(ours), f64(theirs), rtol=2.0**-6, atol=1e-2)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-dequantized", "unquantized"])
def test_linear_in_shard_map(mesh, name):
    """Rows sharded, the weight replicated: the same rows, and the weight's gradient summed."""
    recipe = RECIPES[name]
    x, w = normal(0, (32, 64), jnp.bfloat16), normal(1, (24, 64))
    g = normal(2, (32, 24), jnp.bfloat16)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=True
    )
    def sharded(x, w):
        return jaxfp4.linear(x, w, recipe)

    y, pullback = jax.jit(lambda x, w: jax.vjp(sharded, x, w))(x, w)
    y_whole, pullback_whole = jax.vjp(lambda x, w: jaxfp4.linear(x, w, recipe), x, w)
    assert_same_bits(y, y_whole)
    (dx, dw), (dx_whole, dw_whole) = pullback(g), pullback_whole(g)
    assert_same_bits(dx, dx_whole)
    np.testing.assert_allclose(f64(dw), f64(dw_whole), rtol=1e-5, atol=1e-5)


def test_grouped_linear_in_shard_map_over_experts(mesh):
    """Two experts a device, tokens replicated: each device's rows, summed over devices."""
    x, w = normal(0, (32, 64), jnp.bfloat16), normal(1, (16, 24, 64))
    sizes = jnp.asarray(np.random.default_rng(0).multinomial(32, np.full(16, 1 / 16)), jnp.int32)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=True
    )
    def sharded(x, w, sizes):
        first = 2 * jax.lax.axis_index("data")
        starts = jnp.cumsum(sizes) - sizes
        rows = jnp.arange(32, dtype=jnp.int32) + starts[first]
        own = jax.lax.dynamic_slice_in_dim(sizes, first, 2)
        y = jaxfp4.grouped_linear(x, w, own, rows=rows)
        back = jnp.arange(32, dtype=jnp.int32) - starts[first]
        taken = jnp.where(
            ((back >= 0) & (back < own.sum()))[:, None], y[jnp.clip(back, 0, 31)], jnp.bfloat16(0)
        )
        return jax.lax.psum(taken, "data")

    y, pullback = jax.jit(lambda x, w: jax.vjp(lambda x, w: sharded(x, w, sizes), x, w))(x, w)
    y_whole, pullback_whole = jax.vjp(lambda x, w: jaxfp4.grouped_linear(x, w, sizes), x, w)
    assert_same_bits(y, y_whole)
    g = normal(2, y.shape, jnp.bfloat16)
    (dx, dw), (dx_whole, dw_whole) = pullback(g), pullback_whole(g)
    assert_same_bits(dw, dw_whole)
    np.testing.assert_allclose(f64(dx), f64(dx_whole), rtol=2.0**-7, atol=1e-3)


def test_two_programs_at_once():
    """Handlers keep no state: calls of one program and of another overlap without harm."""
    x, w = normal(0, (64, 64), jnp.bfloat16), normal(1, (48, 64))
    programs = [jax.jit(jaxfp4.linear), jax.jit(lambda x, w: jaxfp4.linear(x, w * jnp.float32(2)))]
    expected = [program(x, w) for program in programs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: programs[i % 2](x, w), range(100)))
    for i, result in enumerate(results):
        assert_same_bits(result, expected[i % 2])
