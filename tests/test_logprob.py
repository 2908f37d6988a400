"""Log-probabilities and entropies against plain fp64 formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp64 import op_value_and_gradients, value_and_gradients
from tolerances import assert_close

import jaxfp4
from jaxfp4.logprob import _forward, _in_chunks, logits_logprob, token_logprob

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
both_dtypes = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def normal(seed, shape, dtype="fp32", scale=1.0):
    x = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return jnp.asarray(x).astype(DTYPES[dtype])


def tokens_below(vocabulary, shape):
    return np.random.default_rng(9).integers(0, vocabulary, shape).astype(np.int32)


def from_logits(logits, tokens, temperature):
    log_p = jax.nn.log_softmax(logits / temperature, axis=-1)
    chosen = jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]
    p = jnp.exp(log_p)
    return chosen, -jnp.where(p > 0, p * log_p, 0).sum(-1)


@pytest.mark.parametrize(
    ("dtype", "head_dtype"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]
)
@pytest.mark.parametrize("vocabulary", [40, 1300, 2048])
def test_token_logprob(vocabulary, dtype, head_dtype):
    """Chunks of the vocabulary: part of one, several and a part, and whole ones."""
    hidden, head = normal(0, (4, 6, 48), dtype), normal(1, (vocabulary, 48), head_dtype, 0.5)
    tokens = tokens_below(vocabulary, (4, 6))
    temperature = np.linspace(0.5, 2, 24, dtype=np.float32).reshape(4, 6)
    cotangents = normal(2, (4, 6)), normal(3, (4, 6))
    # The product's operands are rounded before; the oracle's gradient is to the rounded head.
    rounded_head = head.astype(DTYPES[dtype])
    expected, expected_gradients = value_and_gradients(
        lambda h, w: from_logits(h @ w.T, tokens, temperature.astype(np.float64)[..., None]),
        [hidden, rounded_head],
        cotangents,
    )
    value, (dhidden, dhead) = op_value_and_gradients(
        lambda h, w: token_logprob(h, w, jnp.asarray(tokens), temperature=temperature),
        [hidden, head],
        cotangents,
    )
    for actual, wanted in zip(value, expected, strict=True):
        assert_close(actual, wanted, "logprob")
    assert (dhidden.dtype, dhead.dtype) == (hidden.dtype, head.dtype)
    for gradient, wanted in zip((dhidden, dhead), expected_gradients, strict=True):
        suffix = "_bf16" if gradient.dtype == jnp.bfloat16 else ""
        assert_close(gradient, wanted, f"logprob_grad{suffix}")


@both_dtypes
@pytest.mark.parametrize("vocabulary", [40, 1300])
def test_the_same_bits_from_hidden_states_and_from_logits(vocabulary, dtype):
    hidden, head = normal(0, (130, 300), dtype), normal(1, (vocabulary, 300))
    tokens = jnp.asarray(tokens_below(vocabulary, (130,)))
    logits = jaxfp4.linear(hidden, head, jaxfp4.UNQUANTIZED, out_dtype=jnp.float32)
    direct = jax.jit(token_logprob)(hidden, head, tokens, temperature=jnp.full(130, 0.6))
    for actual, expected in zip(
        direct, logits_logprob(logits, tokens, temperature=0.6), strict=True
    ):
        assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def test_logits_logprob():
    logits, tokens = normal(0, (5, 7, 1300), scale=5.0), tokens_below(1300, (5, 7))
    cotangents = normal(2, (5, 7)), normal(3, (5, 7))
    expected, expected_gradients = value_and_gradients(
        lambda x: from_logits(x, tokens, 0.7), [logits], cotangents
    )
    value, gradients = op_value_and_gradients(
        lambda x: logits_logprob(x, jnp.asarray(tokens), temperature=0.7), [logits], cotangents
    )
    for actual, wanted in zip(value, expected, strict=True):
        assert_close(actual, wanted, "logprob")
    assert_close(gradients[0], expected_gradients[0], "logprob_grad")


@pytest.mark.parametrize("masked", [-np.inf, np.finfo(np.float32).min])
def test_masked_logits(masked):
    """Whole chunks masked, before and after the one that is not: as if they were not there."""
    logits = np.full((1, 1600), masked, np.float32)
    logits[0, 700:704] = [0, 1, 2, 3]
    tokens = jnp.asarray([702], jnp.int32)

    def total(x):
        results = logits_logprob(x, tokens)
        return results[0].sum() + results[1].sum(), results

    gradient, (logprob, entropy) = jax.grad(total, has_aux=True)(jnp.asarray(logits))
    expected = from_logits(np.arange(4.0)[None], np.asarray([2]), 1.0)
    assert_close(logprob, expected[0], "logprob")
    assert_close(entropy, expected[1], "logprob")
    gradient = np.asarray(gradient)
    assert np.isfinite(gradient).all()
    assert not np.delete(gradient, range(700, 704)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("column", [0, 511, 600])
def test_a_logit_that_is_not_finite_makes_its_row_nan(bad, column):
    logits = np.asarray(normal(0, (3, 601))).copy()
    logits[1, column] = bad
    logprob, entropy = logits_logprob(jnp.asarray(logits), jnp.asarray([5, 5, 5], jnp.int32))
    np.testing.assert_array_equal(np.isnan(logprob), [False, True, False])
    np.testing.assert_array_equal(np.isnan(entropy), [False, True, False])


def test_a_token_outside_of_the_vocabulary():
    tokens = jnp.asarray([-1, 40, 2**31 - 1, -(2**31), 0], jnp.int32)
    hidden, head = normal(0, (5, 16)), normal(1, (40, 16))
    logprob, entropy = token_logprob(hidden, head, tokens)
    np.testing.assert_array_equal(np.isnan(logprob), [True] * 4 + [False])
    assert np.isfinite(entropy).all()
    # A padding token that the loss leaves out harms no gradient.
    mask = jnp.asarray([0, 0, 0, 0, 1], jnp.float32)
    gradient = jax.grad(lambda h: jnp.where(mask > 0, token_logprob(h, head, tokens)[0], 0).sum())(
        hidden
    )
    assert np.isfinite(gradient).all()
    assert np.asarray(gradient[4]).any()


def test_the_logits_of_all_rows_never_exist():
    """The compiled gradient's temporaries are a fraction of [rows, V] in fp32."""
    rows, vocabulary, width = 512, 32768, 16
    hidden = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((vocabulary, width), jnp.float32)
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def loss(hidden, head, tokens):
        logprob, entropy = token_logprob(hidden, head, tokens)
        return (logprob - entropy).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(hidden, head, tokens).compile()
    temporaries = compiled.memory_analysis().temp_size_in_bytes
    assert temporaries < rows * vocabulary * 4 / 4, temporaries


def test_a_temperature_may_be_traced():
    logits, tokens = normal(0, (3, 8)), jnp.zeros(3, jnp.int32)
    expected = logits_logprob(logits, tokens, temperature=0.6)
    traced = jax.jit(lambda t: logits_logprob(logits, tokens, temperature=t))(0.6)
    np.testing.assert_array_equal(traced, expected)


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_legal(temperature):
    with pytest.raises(ValueError, match="temperature must be above 0"):
        logits_logprob(normal(0, (3, 8)), jnp.zeros(3, jnp.int32), temperature=temperature)


def test_shapes_that_are_not_legal():
    hidden, head, tokens = normal(0, (3, 8)), normal(1, (20, 8)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match=r"head must be \[V, 8\]"):
        token_logprob(hidden, head.T, tokens)
    with pytest.raises(ValueError, match=r"tokens must be int32 of shape \(3,\)"):
        token_logprob(hidden, head, tokens[:2])
    with pytest.raises(TypeError, match="head must be float32"):
        token_logprob(hidden, head.astype(jnp.bfloat16), tokens)
    with pytest.raises(ValueError, match=r"temperature must be float32 of shape \(3,\)"):
        token_logprob(hidden, head, tokens, temperature=jnp.ones((2,), jnp.float32))
    with pytest.raises(ValueError, match="logits must be float32"):
        logits_logprob(hidden.astype(jnp.bfloat16), tokens)


@both_dtypes
@pytest.mark.parametrize("vocabulary", [40, 1024, 1300])
def test_the_same_bits_from_chunks_of_the_vocabulary(vocabulary, dtype):
    """What a GPU lowers token_logprob to: part of a chunk, whole ones, and both."""
    hidden, head = normal(0, (70, 48), dtype), normal(1, (vocabulary, 48))
    tokens = jnp.asarray(tokens_below(vocabulary, (70,))).at[:2].set(jnp.asarray([-1, vocabulary]))
    temperature = jnp.linspace(0.5, 2, 70, dtype=jnp.float32)
    operands = hidden, head, tokens, temperature
    in_chunks = jax.jit(functools.partial(_in_chunks, chunk=512))(*operands)
    for actual, expected in zip(in_chunks, _forward(*operands), strict=True):
        assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_is_found_where_its_block_adds_nothing(bad):
    """The block's other logits are so far below the largest of all that their sum is zero."""
    logits = np.full((1, 1024), -1000, np.float32)
    logits[0, 3], logits[0, 600] = bad, 0
    for row in (logits, logits[:, ::-1]):
        values = logits_logprob(jnp.asarray(row), jnp.asarray([5], jnp.int32))
        assert np.isnan(values).all()
