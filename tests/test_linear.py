"""linear: values against fp64 products of the oracle's exact operands, gradients, errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from product_cases import RECIPES, assert_product, assert_same_bits, f64, normal

import jaxfp4
from jaxfp4 import RMSNorm, SwiGLU


def exact_operand(x, quantizer: jaxfp4.Quantizer | None, dtype=jnp.bfloat16) -> np.ndarray:
    """What a product should multiply, in fp64: the oracle's values, or x rounded to dtype."""
    if quantizer is None:
        return f64(jnp.asarray(x).astype(dtype))
    return oracle.dequantize(
        oracle.quantize(
            np.asarray(x), quantizer.scope, quantizer.pow2_scale, quantizer.four_over_six
        )
    )


@functools.cache
def jitted(recipe: jaxfp4.Recipe, out_dtype=None):
    return jax.jit(functools.partial(jaxfp4.linear, recipe=recipe, out_dtype=out_dtype))


@functools.cache
def value_and_gradients(recipe: jaxfp4.Recipe, prepared: bool = False):
    """(x, w, g) to y and the gradients of x and w, in one compiled program."""

    @jax.jit
    def run(x, w, g, q=None):
        assert (q is not None) == (prepared and recipe.weight is not None)
        y, pullback = jax.vjp(lambda x, w: jaxfp4.linear(x, w, recipe, quantized=q), x, w)
        return y, *pullback(g)

    return run


@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", RECIPES)
def test_forward_is_the_product_of_the_exact_operands(name, x_dtype, out_dtype):
    recipe = RECIPES[name]
    x, w = normal(0, (33, 272), x_dtype), normal(1, (70, 272), scale=0.1)
    y = jitted(recipe, out_dtype)(x, w)
    assert y.dtype == out_dtype
    fp32 = recipe == jaxfp4.UNQUANTIZED and x_dtype == jnp.float32
    a = exact_operand(x, recipe.activation, jnp.float32 if fp32 else jnp.bfloat16)
    w16 = np.asarray(w.astype(jnp.float32 if fp32 else jnp.bfloat16))
    assert_product(y, a, exact_operand(w16, recipe.weight, w16.dtype))


@pytest.mark.parametrize("k", [16, 48, 112, 128, 2560])
def test_every_shape_is_right(k):
    # Rows, outputs and depths around every tile edge of the kernels, odd ones included.
    for m, n in itertools.product([1, 15, 16, 17, 127, 129], [16, 48, 105, 128]):
        x, w = normal(m, (m, k), jnp.bfloat16), normal(n, (n, k), jnp.bfloat16)
        y = jitted(jaxfp4.NVFP4)(x, w)
        a = exact_operand(x, jaxfp4.NVFP4.activation)
        assert_product(y, a, exact_operand(w, jaxfp4.NVFP4.weight))


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (32,), (2, 3, 32)])
def test_leading_axes_are_kept(shape):
    w = normal(1, (24, 32), jnp.bfloat16)
    x = normal(0, shape, jnp.bfloat16)
    y, pullback = jax.vjp(jaxfp4.linear, x, w)
    assert y.shape == (*shape[:-1], 24)
    dx, dw = pullback(jnp.ones_like(y))
    assert dx.shape == shape
    assert dw.shape == w.shape
    if x.size == 0:
        assert not np.asarray(dw).any()


@pytest.mark.parametrize("w_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_the_bf16_products(name, x_dtype, w_dtype):
    recipe = RECIPES[name]
    x, w = normal(0, (40, 96), x_dtype), normal(1, (56, 96), w_dtype)
    g = normal(2, (40, 56), x_dtype)
    _, dx, dw = value_and_gradients(recipe)(x, w, g)
    assert (dx.dtype, dw.dtype) == (x_dtype, w_dtype)

    dtype = jnp.bfloat16
    if recipe == jaxfp4.UNQUANTIZED and x_dtype == jnp.float32:
        dtype = jnp.float32
    a, b = x.astype(dtype), w.astype(dtype)
    if recipe.backward == "dequantized":
        a = exact_operand(x, recipe.activation)
        b = exact_operand(w.astype(jnp.bfloat16), recipe.weight)
        # The product of three factors is rounded to fp32, then to bf16.
        a, b = (jnp.asarray(v.astype(np.float32)).astype(dtype) for v in (a, b))
    a, b, g = f64(a), f64(b), f64(g.astype(dtype))
    assert_product(dx, g, b.T)
    assert_product(dw, g.T, a.T)


@pytest.mark.parametrize("name", RECIPES)
def test_a_prepared_weight_changes_nothing(name):
    recipe = RECIPES[name]
    x, w = normal(0, (17, 64), jnp.bfloat16), normal(1, (48, 64))
    g = normal(2, (17, 48), jnp.bfloat16)
    q = jaxfp4.prepare(w, recipe)
    assert (q is None) == (recipe.weight is None)
    plain = value_and_gradients(recipe)(x, w, g)
    prepared = value_and_gradients(recipe, prepared=True)(x, w, g, q)
    jax.tree.map(assert_same_bits, prepared, plain)


def fronts(k: int):
    return {"swiglu": SwiGLU(), "rmsnorm": RMSNorm(normal(7, (k,)), 1e-6)}


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-dequantized", "unquantized"])
@pytest.mark.parametrize("front_name", ["swiglu", "rmsnorm"])
def test_a_fused_front_equals_the_op_before(front_name, name):
    recipe, front = RECIPES[name], fronts(64)[front_name]
    width = 128 if front_name == "swiglu" else 64
    x, w = normal(0, (19, width), jnp.bfloat16), normal(1, (48, 64))
    g = normal(2, (19, 48), jnp.bfloat16)

    def unfused(x, w, front):
        if isinstance(front, SwiGLU):
            x = jaxfp4.swiglu(x)
        else:
            x = jaxfp4.rmsnorm(x, front.weight, eps=front.eps)
        return jaxfp4.linear(x, w, recipe)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, x, w, front, g):
        y, pullback = jax.vjp(function, x, w, front)
        return y, *pullback(g)

    def fused(x, w, front):
        return jaxfp4.linear(x, w, recipe, front=front)

    y, dx, dw, d_front = run(fused, x, w, front, g)
    y_unfused, dx_unfused, dw_unfused, d_front_unfused = run(unfused, x, w, front, g)
    assert_same_bits(y, y_unfused)
    assert_same_bits(dw, dw_unfused)
    # The front's derivative is plain jnp: XLA may fuse it in another way.
    np.testing.assert_allclose(f64(dx), f64(dx_unfused), rtol=2.0**-7, atol=1e-6)
    for ours, theirs in zip(
        jax.tree.leaves(d_front), jax.tree.leaves(d_front_unfused), strict=True
    ):
        np.testing.assert_allclose(f64(ours), f64(theirs), rtol=1e-4, atol=1e-3)


def test_a_fused_gate_and_up_share_one_scale():
    # With a scale each, the half that is smaller by ten would be read ten times too large.
    gate, up = normal(0, (32, 64)), normal(1, (32, 64), scale=0.1)
    x = normal(2, (9, 64), jnp.bfloat16)
    both = jnp.concatenate([gate, up])
    q = jaxfp4.prepare(both, jaxfp4.NVFP4)
    y = jaxfp4.linear(x, both, quantized=q, out_dtype=jnp.float32)
    assert q.scale.shape == ()
    a = exact_operand(x, jaxfp4.NVFP4.activation)
    for half, rows in ((gate, slice(0, 32)), (up, slice(32, 64))):
        own = jaxfp4.Fp4Array(q.codes[rows], q.block_scales[rows], q.scale)
        assert_same_bits(jaxfp4.linear(x, half, quantized=own, out_dtype=jnp.float32), y[:, rows])
        assert_product(y[:, rows], a, f64(own.values()) * float(q.scale))


@pytest.mark.parametrize("name", ["nvfp4", "weight-by-row", "unquantized"])
def test_views_and_donated_operands(name):
    """Slices at odd offsets, transposes and donated buffers are read where they really lie."""
    recipe = RECIPES[name]
    big, w = normal(0, (70, 83), jnp.bfloat16), normal(1, (24, 64))

    def sliced(big, w):
        return jaxfp4.linear(big[1:18, 16:80], w, recipe)

    def transposed(big, w):
        return jaxfp4.linear(big.T[3:20, 5:69], w, recipe)

    copies = (np.array(big)[1:18, 16:80].copy(), np.array(big).T[3:20, 5:69].copy())
    for view, copy in zip((sliced, transposed), copies, strict=True):
        assert_same_bits(jax.jit(view)(big, w), jaxfp4.linear(jnp.asarray(copy), w, recipe))

    @functools.partial(jax.jit, donate_argnums=0)
    def update(x, w):
        return x + jaxfp4.linear(x, w, recipe)

    square = normal(3, (64, 64))
    x = normal(4, (16, 64), jnp.bfloat16)
    expected = x + jaxfp4.linear(x, square, recipe)
    assert_same_bits(update(jnp.array(x), square), expected)


def test_the_rounding_to_bf16_is_real():
    """One fp32 value, rounded to bf16 and quantised in three programs: the same bytes."""
    x, w = normal(0, (8, 64)), normal(1, (48, 64))

    def decode(x, w):
        return jaxfp4.linear(x.astype(jnp.bfloat16), w)

    def prefill(x, w):
        h = (x * jnp.float32(1)).astype(jnp.bfloat16)
        return jaxfp4.linear(h, w), h.astype(jnp.float32) * jnp.float32(2)

    def train(x, w):
        @jax.checkpoint
        def block(x, w):
            return jaxfp4.linear((x + jnp.float32(0)).astype(jnp.bfloat16), w)

        return jax.value_and_grad(lambda w: block(x, w).astype(jnp.float32).sum())(w)[1], block(
            x, w
        )

    expected = jaxfp4.linear(jnp.asarray(np.asarray(x).astype(jnp.bfloat16)), w)
    assert_same_bits(jax.jit(decode)(x, w), expected)
    assert_same_bits(jax.jit(prefill)(x, w)[0], expected)
    assert_same_bits(jax.jit(train)(x, w)[1], expected)


# --- Row bits ---

ROWS = 300


@functools.cache
def row_of(name: str, context: str):
    """[M, K] to [M, N] by the recipe, in one of the programs a row may be computed in."""
    recipe = RECIPES[name]

    def plain(x, w):
        return jaxfp4.linear(x, w, recipe)

    def scanned(x, w):
        return jax.lax.scan(lambda c, w: (c, plain(x, w)), 0, w[None])[1][0]

    def differentiated(x, w):
        def loss(x, w):
            y = jax.checkpoint(plain)(x, w)
            return y.astype(jnp.float32).sum(), y

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)[0][1]

    return jax.jit({"jit": plain, "scan": scanned, "grad": differentiated}[context])


@pytest.mark.parametrize("name", ["nvfp4", "weight-by-row", "pow2-four-over-six", "unquantized"])
@settings(max_examples=12, deadline=None)
@given(
    size=st.sampled_from([1, 2, 5, 7, 64, 193, ROWS]),
    context=st.sampled_from(["jit", "scan", "grad"]),
    x_dtype=st.sampled_from(["bfloat16", "float32"]),
    seed=st.integers(0, 2**16),
)
def test_a_row_has_the_same_bits_in_every_batch(name, size, context, x_dtype, seed):
    rng = np.random.default_rng(seed)
    x, w = normal(seed, (ROWS, 96), x_dtype), normal(1, (40, 96))
    rows = rng.permutation(ROWS)[:size]
    whole = row_of(name, "jit")(x, w)
    assert_same_bits(row_of(name, context)(x[rows], w), whole[rows])


# --- Errors ---

X, W = jnp.zeros((4, 32), jnp.bfloat16), jnp.zeros((8, 32))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: jaxfp4.linear(X[:, :24], W[:, :24]), ValueError, "multiple of 16.*24.*nearest"),
        (lambda: jaxfp4.linear(X[:, :16], W), ValueError, "takes 32 values a row.*has 16"),
        (lambda: jaxfp4.linear(X, W, front=SwiGLU()), ValueError, "has 16 after its front"),
        (lambda: jaxfp4.linear(X, W[None]), ValueError, r"w must be \[N, K\]"),
        (lambda: jaxfp4.linear(X.astype(jnp.float16), W), TypeError, "x must be bfloat16"),
        (lambda: jaxfp4.linear(X, W.astype(jnp.int32)), TypeError, "w must be bfloat16"),
        (lambda: jaxfp4.linear(X, W, recipe="nvfp4"), TypeError, "jaxfp4.Recipe, got 'nvfp4'"),
        (lambda: jaxfp4.linear(X, W, out_dtype=jnp.float16), TypeError, "out_dtype.*float16"),
        (lambda: jaxfp4.linear(X, W, implementation="cuda"), ValueError, "implementation.*'cuda'"),
        (
            lambda: jaxfp4.linear(X, W, quantized=jaxfp4.quantize(W, "row")),
            ValueError,
            r"scale \(8,\), expected.*scope 'tensor', scale \(\)",
        ),
        (
            lambda: jaxfp4.linear(X, W, jaxfp4.UNQUANTIZED, quantized=jaxfp4.quantize(W)),
            ValueError,
            "quantized must be None",
        ),
    ],
)
def test_what_is_not_legal_says_so(call, error, says):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize("name", RECIPES)
def test_the_reference_implementation_agrees(name):
    recipe = RECIPES[name]
    x, w = normal(0, (12, 64), jnp.bfloat16), normal(1, (24, 64))

    def loss(x, w, implementation):
        y = jaxfp4.linear(x, w, recipe, out_dtype=jnp.float32, implementation=implementation)
        return jnp.sum(jnp.sin(y))

    for implementation in ("custom_call", "reference"):
        y = jaxfp4.linear(x, w, recipe, out_dtype=jnp.float32, implementation=implementation)
        a = exact_operand(x, recipe.activation)
        assert_product(y, a, exact_operand(np.asarray(w.astype(jnp.bfloat16)), recipe.weight))
    gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    ours, theirs = (
        gradients(x, w, implementation) for implementation in ("custom_call", "reference")
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(f64(a), f64(b), rtol=2.0**-7, atol=2e-2)
