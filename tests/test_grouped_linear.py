"""grouped_linear: bit for bit what linear gives group by group, whatever the sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from product_cases import RECIPES, assert_same_bits, f64, normal

import jaxfp4
from jaxfp4 import RMSNorm, SwiGLU

GROUPS, ROWS, OUTPUTS, DEPTH = 6, 48, 40, 64

# Few different sizes: each is a compiled program of the dense side.
SIZES = {
    "even": [8, 8, 8, 8, 8, 8],
    "ragged": [13, 2, 19, 1, 5, 8],
    "empty first": [0, 19, 13, 8, 5, 2],
    "empty middle and last": [19, 13, 0, 0, 8, 0],
    "one row each": [1, 1, 1, 1, 1, 1],
    "all in one": [0, 0, 0, 48, 0, 0],
    "tail unused": [5, 0, 8, 13, 2, 1],
}

BY_SCOPE_AND_BACKWARD = [
    "nvfp4",
    "nvfp4-dequantized",
    "weight-by-row",
    "weight-by-row-dequantized",
]


def group_rows(sizes) -> list[slice]:
    ends = np.cumsum(sizes)
    return [slice(int(end - size), int(end)) for end, size in zip(ends, sizes, strict=True)]


@functools.cache
def value_and_gradients(name: str):
    """(x, w, group_sizes, g) to y and the gradients of x and w, in one compiled program."""
    recipe = RECIPES[name]

    @jax.jit
    def run(x, w, sizes, g):
        y, pullback = jax.vjp(lambda x, w: jaxfp4.grouped_linear(x, w, sizes, recipe), x, w)
        return y, *pullback(g)

    return run


@functools.cache
def dense_value_and_gradients(name: str):
    """The same of linear: (x, w, g) to y and the gradients of x and w."""

    @jax.jit
    def run(x, w, g):
        y, pullback = jax.vjp(lambda x, w: jaxfp4.linear(x, w, RECIPES[name]), x, w)
        return y, *pullback(g)

    return run


def operands(w_dtype=jnp.float32):
    x = normal(0, (ROWS, DEPTH), jnp.bfloat16)
    w = normal(1, (GROUPS, OUTPUTS, DEPTH), w_dtype)
    g = normal(2, (ROWS, OUTPUTS), jnp.bfloat16)
    return x, w, g


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", BY_SCOPE_AND_BACKWARD)
def test_equals_linear_group_by_group(name, sizes):
    x, w, g = (np.array(operand) for operand in operands())
    # The rows of no group hold NaN: nothing may read them.
    used = sum(sizes)
    x[used:] = g[used:] = np.nan
    y, dx, dw = value_and_gradients(name)(x, w, np.asarray(sizes, np.int32), g)
    y, dx, dw = map(np.asarray, (y, dx, dw))
    for group, rows in enumerate(group_rows(sizes)):
        y_group, dx_group, dw_group = dense_value_and_gradients(name)(x[rows], w[group], g[rows])
        assert_same_bits(y[rows], y_group)
        assert_same_bits(dx[rows], dx_group)
        assert_same_bits(dw[group], dw_group)
    assert not f64(y[used:]).any()
    assert not f64(dx[used:]).any()


@pytest.mark.parametrize("name", ["unquantized", "activation-by-tensor"])
def test_other_recipes_equal_linear_too(name):
    x, w, g = operands()
    sizes = SIZES["tail unused"]
    used = sum(sizes)
    x = x.at[used:].set(jnp.nan)
    y, dx, dw = value_and_gradients(name)(x, w, jnp.asarray(sizes, jnp.int32), g)
    # An activation's one scale spans the rows in use, those of every group.
    amax = np.abs(f64(x[:used])).max()
    for group, rows in enumerate(group_rows(sizes)):
        if rows.start == rows.stop:
            continue
        # A row with the amax of all, so that the dense call finds the same scale.
        marker = jnp.zeros((1, DEPTH), jnp.bfloat16).at[0, 0].set(jnp.bfloat16(amax))
        with_marker = jnp.concatenate([x[rows], marker])
        y_group = one_row(with_marker, w[group], RECIPES[name])
        assert_same_bits(y[rows], y_group[:-1])
    assert np.isfinite(f64(dx)).all()
    assert np.isfinite(f64(dw)).all()


# --- Fused layouts: each front, the gather, and their pairs, against the unfused ops ---

LAYOUTS = {
    "swiglu": ("swiglu", False),
    "rmsnorm": ("rmsnorm", False),
    "gather": (None, True),
    "swiglu after gather": ("swiglu", True),
    "rmsnorm after gather": ("rmsnorm", True),
}


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-dequantized", "unquantized"])
@pytest.mark.parametrize(("front_name", "gather"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_fused_layout_equals_the_unfused_ops(front_name, gather, name):
    recipe = RECIPES[name]
    width = 2 * DEPTH if front_name == "swiglu" else DEPTH
    x, w = normal(0, (20, width), jnp.bfloat16), normal(1, (GROUPS, OUTPUTS, DEPTH))
    # Rows twice, rows never, and two that are not in x at all and count as zeros.
    index = np.random.default_rng(3).integers(0, 20, 33)
    index[[4, 17]] = [-1, 20]
    rows = jnp.asarray(index, jnp.int32) if gather else None
    sizes = jnp.asarray([3, 0, 10, 1, 4, 1], jnp.int32)
    weight = normal(7, (DEPTH,))

    def fused(x, w, weight):
        front = {"swiglu": SwiGLU(), "rmsnorm": RMSNorm(weight, 1e-6), None: None}[front_name]
        return jaxfp4.grouped_linear(x, w, sizes, recipe, front=front, rows=rows)

    def unfused(x, w, weight):
        if gather:
            inside = (index >= 0) & (index < 20)
            x = jnp.where(inside[:, None], x[np.where(inside, index, 0)], jnp.bfloat16(0))
        if front_name == "swiglu":
            x = jaxfp4.swiglu(x)
        elif front_name == "rmsnorm":
            x = jaxfp4.rmsnorm(x, weight, eps=1e-6)
        return jaxfp4.grouped_linear(x, w, sizes, recipe)

    g = normal(2, (33 if gather else 20, OUTPUTS), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, x, w, weight, g):
        y, pullback = jax.vjp(function, x, w, weight)
        return y, pullback(g)

    y, (dx, dw, d_weight) = run(fused, x, w, weight, g)
    y_unfused, unfused_gradients = run(unfused, x, w, weight, g)
    assert_same_bits(y, y_unfused)
    assert_same_bits(dw, unfused_gradients[1])
    # The front's derivative and the sum over a row's copies are XLA's own.
    scale = np.abs(f64(unfused_gradients[0])).max()
    np.testing.assert_allclose(f64(dx), f64(unfused_gradients[0]), atol=scale * 2.0**-6)
    np.testing.assert_allclose(f64(d_weight), f64(unfused_gradients[2]), rtol=1e-3, atol=1e-2)


# --- Empty groups, repeated and dirty calls, isolation ---


def test_empty_groups_give_exact_zeros_over_dirty_memory():
    """Eight tokens for a few of 128 experts, after a full batch left large values behind."""
    w = normal(1, (128, 16, 16))
    run = value_and_gradients("nvfp4")
    large = jnp.full((128, 16), 1e4, jnp.bfloat16)
    jax.block_until_ready(run(large, w, jnp.ones(128, jnp.int32), large))
    sizes = np.zeros(128, np.int32)
    sizes[[3, 40, 127]] = [2, 5, 1]
    x = normal(0, (128, 16), jnp.bfloat16)
    _, _, dw = run(x, w, jnp.asarray(sizes), large)
    assert not f64(dw[sizes == 0]).any()
    assert f64(dw[sizes > 0]).any(axis=(1, 2)).all()


@pytest.mark.parametrize(
    "sizes", [[0, 5, 0, 0, 3, 0], [0] * 6, [48, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 48]]
)
def test_every_call_gives_the_same_bits(sizes):
    x, w, g = operands()
    run = value_and_gradients("nvfp4")
    first = run(x, w, jnp.asarray(sizes, jnp.int32), g)
    for _ in range(20):
        again = run(x, w, jnp.asarray(sizes, jnp.int32), g)
        jax.tree.map(assert_same_bits, again, first)


@pytest.mark.parametrize("change", [2.0, np.nan])
def test_one_expert_does_not_reach_another(change):
    x, w, g = operands()
    sizes = jnp.asarray(SIZES["ragged"], jnp.int32)
    run = value_and_gradients("nvfp4")
    y, dx, dw = run(x, w, sizes, g)
    y_changed, dx_changed, dw_changed = run(x, w.at[0].multiply(np.float32(change)), sizes, g)
    first = SIZES["ragged"][0]
    assert_same_bits(y_changed[first:], y[first:])
    assert_same_bits(dx_changed[first:], dx[first:])
    assert_same_bits(dw_changed, dw)
    assert (f64(y_changed[:first]) != f64(y[:first])).any(axis=1).all()


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 50), min_size=GROUPS, max_size=GROUPS).filter(
        lambda sizes: sum(sizes) <= 300
    ),
    seed=st.integers(0, 2**16),
)
def test_a_row_has_the_same_bits_as_in_linear(sizes, seed):
    """Any sizes, up to 300 rows: each row equals the same row alone through linear."""
    x, w = normal(seed, (300, DEPTH), jnp.bfloat16), normal(1, (GROUPS, OUTPUTS, DEPTH))
    y = forward(x, w, jnp.asarray(sizes, jnp.int32))
    group = np.repeat(np.arange(GROUPS), sizes)
    for row in range(0, sum(sizes), 29):
        assert_same_bits(y[row], one_row(x[row], w[group[row]]))


forward = jax.jit(jaxfp4.grouped_linear)
one_row = jax.jit(jaxfp4.linear, static_argnums=2)


@pytest.mark.parametrize("name", RECIPES)
def test_the_reference_implementation_agrees(name):
    x, w, _ = operands()
    sizes = jnp.asarray(SIZES["tail unused"], jnp.int32)

    def loss(x, w, implementation):
        y = jaxfp4.grouped_linear(
            x, w, sizes, RECIPES[name], out_dtype=jnp.float32, implementation=implementation
        )
        return jnp.sum(jnp.sin(y)), y

    gradients = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    ours, theirs = (
        gradients(x, w, implementation) for implementation in ("custom_call", "reference")
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(f64(a), f64(b), rtol=2.0**-7, atol=2e-2)


# --- Errors ---

X, W, S = jnp.zeros((4, 32), jnp.bfloat16), jnp.zeros((2, 8, 32)), jnp.zeros((2,), jnp.int32)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: jaxfp4.grouped_linear(X, W[0], S), r"w must be \[G, N, K\]"),
        (lambda: jaxfp4.grouped_linear(X[None], W, S), r"x must be \[M, K\]"),
        (lambda: jaxfp4.grouped_linear(X, W[:0], S[:0]), "G > 0"),
        (lambda: jaxfp4.grouped_linear(X, W, S[:1]), "1 groups and w 2"),
        (lambda: jaxfp4.grouped_linear(X, W, S.astype(jnp.float32)), "group_sizes must be int32"),
        (lambda: jaxfp4.grouped_linear(X, W, S, rows=S[None]), "rows must be int32"),
        (lambda: jaxfp4.grouped_linear(X, W.mT, S), "takes 8 values a row.*has 32"),
    ],
)
def test_what_is_not_legal_says_so(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    ("sizes", "says"), [([3, 2], "add up to 5, more than the 4 rows"), ([-1, 2], r"\[0\] is -1")]
)
def test_sizes_that_do_not_fit_raise_on_the_cpu(sizes, says):
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(forward(X, W, jnp.asarray(sizes, jnp.int32)))


@pytest.mark.parametrize("sizes", [[3, -1], [3, 2]])
def test_the_reference_refuses_group_sizes_whose_values_it_knows(sizes):
    x, w = jnp.ones((4, 16)), jnp.ones((2, 16, 16))
    with pytest.raises(ValueError, match=r"group_sizes=\[3, .*at most the 4 rows"):
        jaxfp4.grouped_linear(x, w, jnp.array(sizes, jnp.int32), implementation="reference")
