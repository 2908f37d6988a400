"""jaxfp4.quantize, the custom call, against the oracle: every byte, a million values a case."""

import functools
import itertools

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizer_cases import (
    OPTIONS,
    Options,
    assert_same_bytes,
    every_class,
    every_dtype,
    every_option,
    expected,
    make,
)

import jaxfp4
from jaxfp4.custom_calls import absent, call
from jaxfp4.quantize import quantize_rows


def fields(q: jaxfp4.Fp4Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    assert q.codes.dtype == jnp.uint8
    assert q.block_scales.dtype == jnp.float8_e4m3fn
    assert q.scale.dtype == jnp.float32
    return q.codes, q.block_scales, q.scale


@functools.cache
def quantize(options: Options):
    return jax.jit(functools.partial(jaxfp4.quantize, **options.static))


@every_option
@every_dtype
@every_class
def test_equals_the_oracle(name, dtype, options):
    x = make(name, dtype)
    actual = quantize(options)(x, amax=options.amax(x))
    assert_same_bytes(fields(actual), tuple(expected(name, dtype, options)))


@pytest.mark.parametrize("switches", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("scope", ["row", "tensor"])
@every_dtype
def test_every_combination_of_options_equals_the_oracle(dtype, scope, switches):
    options = Options(scope, *switches)
    x = np.concatenate([make(name, dtype)[:, :4] for name in inputs.CLASSES])
    actual = quantize(options)(x, amax=options.amax(x))
    assert_same_bytes(
        fields(actual), tuple(oracle.quantize(x, **options.static, amax=options.amax(x)))
    )


@pytest.mark.parametrize("scope", ["row", "tensor"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (129, 80), (2, 3, 4, 32), (1, 1, 16), (0, 32)])
def test_shapes(shape, scope):
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    q = jaxfp4.quantize(x, scope)
    assert q.shape == shape
    assert_same_bytes(fields(q), tuple(oracle.quantize(x, scope)))


def test_a_vector_is_a_row():
    x = make("normal", "bfloat16")[0, 0]
    assert_same_bytes(fields(jaxfp4.quantize(x)), tuple(oracle.quantize(x)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_subnormal=True), min_size=32, max_size=32),
    st.sampled_from(OPTIONS),
)
def test_any_values_equal_the_oracle(values, options):
    x = np.array(values, np.float32).reshape(1, 32)
    amax = np.full((1,) if options.scope == "row" else (), 100, np.float32)
    amax = amax if options.given_amax else None
    actual = quantize(options)(x, amax=amax)
    assert_same_bytes(fields(actual), tuple(oracle.quantize(x, **options.static, amax=amax)))


# --- Transformations and views ---


@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_vmap_scan_and_remat_change_no_bit(scope):
    x = make("heavy_tailed", "bfloat16")[:, :8]
    want = tuple(oracle.quantize(x, scope))
    one = functools.partial(jaxfp4.quantize, scope=scope)
    assert_same_bytes(fields(jax.vmap(one)(x)), want)
    assert_same_bytes(fields(jax.vmap(jax.vmap(one))(x[None])), tuple(a[None] for a in want))
    assert_same_bytes(fields(jax.lax.scan(lambda _, x: (None, one(x)), None, x)[1]), want)
    assert_same_bytes(fields(jax.jit(jax.checkpoint(one))(x)), want)


def test_vmap_over_amax_alone():
    x = make("normal", "float32")[0, :4]
    amax = np.array([[1, 2, 3, 4], [0, -1, 1e-3, 9]], np.float32)
    actual = jax.vmap(lambda amax: jaxfp4.quantize(x, amax=amax))(amax)
    want = oracle.quantize(np.stack([x, x]), amax=amax)
    assert_same_bytes(fields(actual), tuple(want))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:34],
        lambda x: x[:, 16:],
        lambda x: x[3:, 80:96],
        lambda x: x[:64, :128].T,
        lambda x: x[::3, ::-1],
    ],
)
@every_dtype
def test_views_equal_their_copies(dtype, view):
    x = make("normal", dtype)[0]
    actual = jax.jit(lambda x: jaxfp4.quantize(view(x)))(x)
    assert_same_bytes(fields(actual), tuple(oracle.quantize(np.ascontiguousarray(view(x)))))


def test_a_donated_input_gives_the_same_bytes():
    x = make("normal", "bfloat16")[0]
    donating = jax.jit(lambda x: (jaxfp4.quantize(x), x + 1), donate_argnums=0)
    actual, _ = donating(jnp.array(x))
    assert_same_bytes(fields(actual), tuple(oracle.quantize(x)))


def test_a_bfloat16_rounding_before_it_is_not_dropped():
    x = make("normal", "float32")[0]
    want = oracle.quantize(oracle.bfloat16(x * np.float32(1.1)))
    program = jax.jit(lambda x: jaxfp4.quantize((x * np.float32(1.1)).astype(jnp.bfloat16)))
    assert_same_bytes(fields(program(x)), tuple(want))


# --- Fused fronts, gather and unused rows ---


@functools.cache
def fused(front: type, quantizer: jaxfp4.Quantizer, rows_per_scale: int):
    def run(x, weight):
        chosen = jaxfp4.SwiGLU() if front is jaxfp4.SwiGLU else jaxfp4.RMSNorm(weight, 1e-6)
        return quantize_rows(x, quantizer, rows_per_scale=rows_per_scale, front=chosen)

    return jax.jit(run)


@pytest.mark.parametrize("front", [jaxfp4.SwiGLU, jaxfp4.RMSNorm])
@every_dtype
@every_class
def test_a_fused_front_is_the_front_then_quantize(name, dtype, front):
    x = make(name, dtype, 250_000)
    weight = np.random.default_rng(1).standard_normal(x.shape[-1], np.float32)
    y = oracle.swiglu(x) if front is jaxfp4.SwiGLU else oracle.rmsnorm(x, weight, 1e-6)
    for scope, four_over_six in [("row", False), ("tensor", True)]:
        rows_per_scale = 1 if scope == "row" else x.shape[1]
        quantizer = jaxfp4.Quantizer(scope, four_over_six=four_over_six)
        actual = fused(front, quantizer, rows_per_scale)(x.reshape(-1, x.shape[-1]), weight)
        codes, block_scales, scale = oracle.quantize(y, scope, four_over_six=four_over_six)
        width = y.shape[-1]
        want = codes.reshape(-1, width // 2), block_scales.reshape(-1, width // 16), scale.ravel()
        assert_same_bytes(fields(actual), want)


@pytest.mark.parametrize("width", [16, 48, 80])
def test_a_fused_rmsnorm_of_an_odd_width(width):
    x = make("heavy_tailed", "bfloat16")[0, :, :width]
    weight = np.ones(width, np.float32)
    actual = fused(jaxfp4.RMSNorm, jaxfp4.Quantizer(), 1)(x, weight)
    assert_same_bytes(fields(actual), tuple(oracle.quantize(oracle.rmsnorm(x, weight, 1e-6))))


def test_gathered_rows_and_unused_rows():
    x = np.array(make("normal", "bfloat16")[0, :6])
    x[4] = np.nan  # gathered by an unused row alone
    rows = np.array([2, 0, 0, 5, -1, 6, 1, 4, 4], np.int32)
    group_sizes = np.array([3, 0, 4], np.int32)
    q = jax.jit(functools.partial(quantize_rows, quantizer=jaxfp4.Quantizer(), rows_per_scale=1))(
        x, rows=rows, group_sizes=group_sizes
    )
    gathered = np.concatenate([x, np.zeros_like(x)])[[2, 0, 0, 5, 6, 6, 1, 6, 6]]
    assert_same_bytes(fields(q), tuple(oracle.quantize(gathered)))


# --- The layouts that kernels of other platforms read ---


def other_layout(name, results, x, group_sizes=None):
    groups = absent(jnp.int32) if group_sizes is None else jnp.asarray(group_sizes, jnp.int32)
    operands = (absent(jnp.float32), absent(jnp.int32), absent(jnp.float32), groups)
    attributes = {"front": np.int64(0), "eps": np.float32(0), "rows_per_scale": np.int64(1)}
    attributes |= {"pow2_scale": False, "four_over_six": False}
    return jax.jit(lambda x: call(name, results, x, *operands, **attributes))(x)


def test_expanded_values_are_code_times_block_scale():
    x = make("heavy_tailed", "bfloat16")[0]
    results = [(x.shape, jnp.bfloat16), (x.shape[:1], jnp.float32)]
    values, scale = other_layout("quantize_expanded", results, x)
    q = oracle.quantize(x)
    np.testing.assert_array_equal(
        values.astype(jnp.float32), oracle.operand(q.codes, q.block_scales)
    )
    assert_same_bytes(scale, q.scale)


@pytest.mark.parametrize("group_sizes", [None, [130, 0, 1, 128]])
def test_tiled_block_scales(group_sizes):
    x = make("normal", "bfloat16")[0, :260, :80]  # five blocks a row: padded to eight
    sizes = [260] if group_sizes is None else group_sizes
    starts = np.cumsum([0, *sizes])
    q = oracle.quantize(x)
    want = [oracle.tile_scales(q.block_scales[a:b]) for a, b in itertools.pairwise(starts)]
    # Room for the rows and a whole tile more for each group.
    room = -(-(260 + 128 * len(group_sizes or ())) // 128) * 2 * 512
    want = np.pad(np.concatenate(want), (0, room - sum(map(len, want))))
    results = [(q.codes.shape, jnp.uint8), (want.shape, jnp.uint8), (q.scale.shape, jnp.float32)]
    codes, tiled, scale = other_layout("quantize_tiled", results, x, group_sizes)
    used = sum(sizes)
    assert_same_bytes(tiled, want)
    assert_same_bytes((codes[:used], scale[:used]), (q.codes[:used], q.scale[:used]))


# --- What is refused, when it is traced ---

ONES = jnp.ones((2, 32))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": jnp.ones((2, 17))}, ValueError, r"multiple of 16.*17.*\(2, 17\).*16"),
        ({"x": jnp.ones((2, 0))}, ValueError, "multiple of 16"),
        ({"x": jnp.float32(1)}, ValueError, "x must have at least 1 axes"),
        ({"x": jnp.ones((2, 32), jnp.float16)}, TypeError, "float16"),
        ({"x": jnp.ones((2, 32), jnp.int32)}, TypeError, "int32"),
        ({"x": jnp.ones(32), "scope": "tensor"}, ValueError, r"matrix.*\(32,\)"),
        ({"x": ONES, "scope": "column"}, ValueError, "'row' or 'tensor', got 'column'"),
        ({"x": ONES, "amax": jnp.ones(3)}, ValueError, r"amax.*\(2,\).*\(3,\)"),
        ({"x": ONES, "amax": jnp.ones(2, jnp.bfloat16)}, ValueError, "amax.*float32.*bfloat16"),
        ({"x": ONES, "scope": "tensor", "amax": jnp.ones(2)}, ValueError, r"amax.*\(\)"),
    ],
)
def test_what_is_not_legal_raises_when_traced(arguments, error, message):
    arrays = {key: value for key, value in arguments.items() if key in ("x", "amax")}
    options = {key: value for key, value in arguments.items() if key not in arrays}
    with pytest.raises(error, match=message):
        jax.eval_shape(functools.partial(jaxfp4.quantize, **options), **arrays)
