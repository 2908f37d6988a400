"""Attention against a plain fp64 formula, and the same bits for a query however it is called."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp64 import op_value_and_gradients, value_and_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close

from jaxfp4.attention import attention

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
both_dtypes = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def normal(seed, shape, dtype):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(x).astype(DTYPES[dtype])


def formula(q, k, v, mask, scale):
    """Softmax over each query's own slots, mask [B, 1, T, S]; zeros where there are none."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    largest = jnp.where(mask, scores, -1e30).max(-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores - largest, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhts,bshd->bthd", weights / jnp.where(total > 0, total, 1), v)


def causal(starts, length):
    """Ranges of sequences that begin at `starts` and fill the buffer; padding has none."""
    slot = np.arange(length)
    start = np.broadcast_to(np.asarray(starts)[:, None], (len(starts), length))
    return start, np.where(slot >= start, slot + 1, start)


def random_ranges(seed, batch, queries, slots):
    """Any range for each query: empty ones, and ones that reach out of the buffer."""
    rng = np.random.default_rng(seed)
    start = rng.integers(-5, slots, (batch, queries))
    return start, start + rng.integers(-2, slots, (batch, queries))


SHAPES = {
    # name: batch, queries, slots, heads, kv_heads, head_dim, ranges
    "left-padded training": (2, 70, 70, 4, 2, 24, causal([0, 17], 70)),
    "more rows than a tile": (1, 150, 150, 2, 1, 40, causal([3], 150)),
    "decode": (5, 1, 150, 4, 2, 16, random_ranges(0, 5, 1, 150)),
    "any ranges": (2, 40, 90, 3, 3, 20, random_ranges(1, 2, 40, 90)),
}


@both_dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients(shape, dtype):
    batch, queries, slots, heads, kv_heads, dim, (start, end) = SHAPES[shape]
    start, end = start.astype(np.int32), end.astype(np.int32)
    operands = [
        normal(0, (batch, queries, heads, dim), dtype),
        normal(1, (batch, slots, kv_heads, dim), dtype),
        normal(2, (batch, slots, kv_heads, dim), dtype),
    ]
    d_o = normal(3, operands[0].shape, dtype)
    slot, scale = np.arange(slots), 0.3
    mask = ((slot >= start[..., None]) & (slot < end[..., None]))[:, None]
    expected, expected_gradients = value_and_gradients(
        lambda q, k, v: formula(q, k, v, mask, scale), operands, d_o
    )
    value, gradients = op_value_and_gradients(
        lambda q, k, v: attention(q, k, v, jnp.asarray(start), jnp.asarray(end), scale=scale),
        operands,
        d_o,
    )
    assert_close(value, expected, f"attention_{dtype}")
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == operands[0].dtype
        assert_close(gradient, expected_gradient, f"attention_grad_{dtype}")


def test_scale_defaults_to_the_inverse_root_of_the_head():
    q, k, v = (normal(i, (1, 3, 1, 16), "fp32") for i in range(3))
    ranges = jnp.zeros((1, 3), jnp.int32), jnp.full((1, 3), 3, jnp.int32)
    default, given_scale = attention(q, k, v, *ranges), attention(q, k, v, *ranges, scale=0.25)
    np.testing.assert_array_equal(default, given_scale)


# --- The bits of a query: one causal sequence of LENGTH tokens, run by itself, then otherwise. ---

LENGTH, HEADS, KV_HEADS, DIM = 150, 4, 2, 24
SLOTS = 256


@functools.cache
def sequence(dtype):
    """q, k, v of the sequence, and its output run alone."""
    shapes = [(1, LENGTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (normal(i, shape, dtype) for i, shape in enumerate(shapes))
    start, end = (jnp.asarray(r, jnp.int32) for r in causal([0], LENGTH))
    o = np.asarray(attention(q, k, v, start, end))
    return *(np.asarray(x) for x in (q, k, v)), o


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.tobytes() == expected.tobytes()


def in_buffer(x, offset, slots=SLOTS):
    """The sequence from `offset` on in a buffer that holds NaN elsewhere."""
    buffer = np.full((1, slots, *x.shape[2:]), np.nan, x.dtype)
    buffer[:, offset : offset + x.shape[1]] = x
    return buffer


run = jax.jit(attention)


@both_dtypes
@settings(max_examples=12, deadline=None, derandomize=True)
@given(offset=st.integers(0, SLOTS - LENGTH))
def test_padding_on_either_side(dtype, offset):
    q, k, v, o = sequence(dtype)
    slot = np.arange(SLOTS)
    inside = (slot >= offset) & (slot < offset + LENGTH)
    start = np.where(inside, offset, 0).astype(np.int32)
    end = np.where(inside, slot + 1, 0).astype(np.int32)
    padded = run(*(in_buffer(x, offset) for x in (q, k, v)), start[None], end[None])
    assert_same_bits(padded[:, inside], o)
    assert not np.asarray(padded[:, ~inside], np.float32).any()


@both_dtypes
@settings(max_examples=12, deadline=None, derandomize=True)
@given(token=st.integers(0, LENGTH - 1), offset=st.integers(0, SLOTS - LENGTH))
def test_decoding_one_token(dtype, token, offset):
    """Later slots still hold what was there before: NaN."""
    q, k, v, o = sequence(dtype)
    k, v = (in_buffer(x[:, : token + 1], offset) for x in (k, v))
    start = np.full((1, 1), offset, np.int32)
    one = run(q[:, token : token + 1], k, v, start, start + token + 1)
    assert_same_bits(one, o[:, token : token + 1])


@both_dtypes
@pytest.mark.parametrize("slots", [LENGTH, 1024])
def test_prefill_in_pieces_into_a_buffer_of_any_length(dtype, slots):
    q, k, v, o = sequence(dtype)
    k, v = (in_buffer(x, 0, slots) for x in (k, v))
    for first in range(0, LENGTH, 50):
        end = np.arange(first + 1, first + 51, dtype=np.int32)[None]
        piece = run(q[:, first : first + 50], k, v, np.zeros_like(end), end)
        assert_same_bits(piece, o[:, first : first + 50])


@both_dtypes
def test_packed_with_other_sequences(dtype):
    """Three sequences in one row of the batch, ours in the middle, and other rows beside it."""
    q, k, v, o = sequence(dtype)

    def pack(seed, x):
        before, after = (
            np.asarray(normal(seed + i, (1, n, *x.shape[2:]), dtype)) for i, n in ((0, 41), (1, 33))
        )
        ours = np.concatenate([before, x, after], axis=1)
        other = np.asarray(normal(seed + 2, ours.shape, dtype))
        return np.concatenate([other, ours, other])

    starts = np.repeat([0, 41, 41 + LENGTH], [41, LENGTH, 33]).astype(np.int32)
    ends = np.arange(1, starts.size + 1, dtype=np.int32)
    start, end = (np.tile(r, (3, 1)) for r in (starts, ends))
    packed = run(*(pack(10 * i, x) for i, x in enumerate((q, k, v))), start, end)
    assert_same_bits(packed[1:2, 41 : 41 + LENGTH], o)


@both_dtypes
def test_heads_do_not_share_bits(dtype):
    """A query head alone with its key-value head, as when heads are sharded."""
    q, k, v, o = sequence(dtype)
    start, end = (r.astype(np.int32) for r in causal([0], LENGTH))
    for head in (0, 3):
        kv_head = slice(head // 2, head // 2 + 1)
        one = run(q[:, :, head : head + 1], k[:, :, kv_head], v[:, :, kv_head], start, end)
        assert_same_bits(one, o[:, :, head : head + 1])


@both_dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_later_tokens_cannot_reach_earlier_ones(dtype, bad):
    """Not forward, and not backward into an earlier query's gradient."""
    q, k, v, o = sequence(dtype)
    start, end = (r.astype(np.int32) for r in causal([0], LENGTH))
    d_o = np.asarray(normal(5, q.shape, dtype))

    @jax.jit
    def value_and_dq(q, k, v):
        value, pull = jax.vjp(lambda q: attention(q, k, v, start, end), q)
        return value, pull(d_o)[0]

    _, dq = value_and_dq(q, k, v)
    k, v = k.copy(), v.copy()
    k[:, 100], v[:, 101] = bad, bad
    spoiled, spoiled_dq = value_and_dq(q, k, v)
    assert_same_bits(spoiled[:, :100], o[:, :100])
    assert_same_bits(spoiled_dq[:, :100], dq[:, :100])
    assert not np.isfinite(np.asarray(spoiled[:, 101:], np.float32)).any()


@both_dtypes
def test_padding_gets_no_gradient_and_gives_none(dtype):
    """NaN in every padding slot, of the cotangent too."""
    q, k, v, _ = sequence(dtype)
    offset = 60
    slot = np.arange(SLOTS)
    inside = (slot >= offset) & (slot < offset + LENGTH)
    d_o = np.asarray(normal(5, q.shape, dtype))
    alone = tuple(r.astype(np.int32) for r in causal([0], LENGTH))
    # Padding queries share the start of the real ones, so that they are rows of the same tiles.
    start = np.full((1, SLOTS), offset, np.int32)
    end = np.where(inside, slot + 1, offset).astype(np.int32)[None]

    @jax.jit
    def gradients(q, k, v, start, end, d_o):
        _, pull = jax.vjp(lambda q, k, v: attention(q, k, v, start, end), q, k, v)
        return pull(d_o)

    expected = gradients(q, k, v, *alone, d_o)
    padded = gradients(
        *(in_buffer(x, offset) for x in (q, k, v)), start, end, in_buffer(d_o, offset)
    )
    for actual, wanted in zip(padded, expected, strict=True):
        assert not np.asarray(actual[:, ~inside], np.float32).any()
        assert_close(actual[:, inside], wanted, f"attention_grad_{dtype}")


def test_ranges_are_cut_to_the_buffer():
    q, k, v, _ = sequence("fp32")
    inside = np.zeros((1, LENGTH), np.int32), np.full((1, LENGTH), LENGTH, np.int32)
    expected = run(q, k, v, *inside)
    assert_same_bits(run(q, k, v, inside[0] - 2**30, inside[1] + 2**30), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"k": (2, 5, 3, 8)}, r"heads must divide q's 4 heads"),
        ({"k": (1, 5, 2, 8)}, r"k must be \[2, S, Hk, 8\]"),
        ({"v": (2, 6, 2, 8)}, r"v must be float32 of shape \(2, 5, 2, 8\)"),
        ({"key_end": (2, 4)}, r"key_end must be int32 of shape \(2, 3\)"),
        ({"q": (3, 4, 8)}, r"q must be \[B, T, Hq, D\]"),
    ],
)
def test_shapes_that_are_not_legal(changed, message):
    shapes = {"q": (2, 3, 4, 8), "k": (2, 5, 2, 8), "v": (2, 5, 2, 8)}
    shapes |= {"key_start": (2, 3), "key_end": (2, 3)} | changed
    operands = {
        name: jnp.zeros(shape, jnp.int32 if "key" in name else jnp.float32)
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=message):
        attention(**operands)


def test_a_cotangent_reaches_only_the_keys_of_its_own_query():
    q, k, v = (normal(i, (1, 8, 1, 16), "fp32") for i in range(3))
    start = jnp.zeros((1, 8), jnp.int32)
    end = jnp.arange(1, 9, dtype=jnp.int32)[None]
    _, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, start, end), q, k, v)
    g = normal(3, (1, 8, 1, 16), "fp32")
    _, dk, dv = pullback(g.at[0, 2].set(0.0))
    _, dk_nan, dv_nan = pullback(g.at[0, 2].set(jnp.nan))
    for clean, other in ((dk, dk_nan), (dv, dv_nan)):
        np.testing.assert_array_equal(clean[0, 3:], other[0, 3:])
        assert np.isnan(other[0, :3]).any(axis=(1, 2)).all()


def test_scores_of_minus_infinity_before_finite_ones():
    slots = 70
    q = jnp.full((1, 1, 1, 16), 1e3)
    k = jnp.full((1, slots, 1, 16), -3e38).at[:, 66:].set(0.0)
    v = normal(0, (1, slots, 1, 16), "fp32")
    start, end = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), slots, jnp.int32)
    o = attention(q, k, v, start, end)
    np.testing.assert_allclose(o[0, 0, 0], v[0, 66:, 0].mean(axis=0), rtol=1e-5)
