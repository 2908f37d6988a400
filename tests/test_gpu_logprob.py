"""Log-probabilities on a GPU: the CPU's bytes from given logits, rows that depend on no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_bits import assert_same_bits, assert_same_on_both, needs_gpu, on_cpu, on_gpu
from test_logprob import from_logits, normal, tokens_below
from tolerances import assert_close

import jaxfp4
from jaxfp4.custom_calls import call

pytestmark = needs_gpu


def odd_logits(rows, vocabulary):
    """Logits with ties, far-apart blocks, masks of whole blocks and values that are not finite."""
    rng = np.random.default_rng([rows, vocabulary])
    x = rng.standard_normal((rows, vocabulary), np.float32) * 5
    blocks = -(-vocabulary // 512)
    for row in range(rows):
        first = 512 * int(rng.integers(0, blocks))
        match row % 9:
            case 1:
                x[row, first : first + 512] = -np.inf
            case 2:
                x[row, first : first + 512] -= 80
            case 3:
                x[row, :first] = -np.inf
            case 4:
                x[row, rng.integers(0, vocabulary)] = [np.nan, np.inf][row // 9 % 2]
            case 5:
                x[row] = np.round(x[row])
            case 6:
                x[row] = -np.inf
                x[row, rng.integers(0, vocabulary)] = 3
            case 7:
                x[row] *= np.float32(2.0**-127)
            case 8:
                x[row] = np.finfo(np.float32).min
                x[row, first : first + 3] = 1
    return jnp.asarray(x)


@pytest.mark.parametrize("rows", [1, 9, 100])
@pytest.mark.parametrize("vocabulary", [1, 40, 511, 512, 513, 1300, 20000, 151936])
def test_from_logits(vocabulary, rows):
    rows = min(rows, 20) if vocabulary > 100000 else rows
    tokens = np.random.default_rng(1).integers(-1, vocabulary + 1, (rows,)).astype(np.int32)
    temperature = np.resize(np.asarray([1, 0.6, 1.7, 1e-3], np.float32), rows)
    assert_same_on_both(
        lambda x, token, t: jaxfp4.logits_logprob(x, token, temperature=t),
        odd_logits(rows, vocabulary),
        tokens,
        temperature,
    )


def in_chunks(logits, tokens, temperature, sizes):
    rows = logits.shape[0]
    state = jnp.tile(jnp.asarray([-jnp.inf, 0, 0, jnp.nan], jnp.float32), (rows, 1))
    types = [((rows, 4), jnp.float32), *[((rows,), jnp.float32)] * 3]
    first, results = 0, ()
    for size in sizes:
        part = logits[:, first : first + size]
        state, *results = call("logprob_chunk", types, part, tokens - first, temperature, state)
        first += size
    assert first == logits.shape[1]
    return state, *results


@pytest.mark.parametrize("sizes", [[1300], [512, 788], [1024, 276], [512, 512, 276]])
def test_chunks_of_any_size(sizes):
    """The CPU's states, and the results of all logits at once."""
    logits = odd_logits(50, 1300)
    tokens = jnp.asarray(np.random.default_rng(2).integers(-1, 1301, (50,)), jnp.int32)
    temperature = jnp.linspace(0.5, 2, 50, dtype=jnp.float32)

    def run(*operands):
        return in_chunks(*operands, sizes)

    actual = on_gpu(run, logits, tokens, temperature)
    assert_same_bits(actual, on_cpu(run, logits, tokens, temperature))
    whole = on_gpu(
        lambda x, token, t: jaxfp4.logits_logprob(x, token, temperature=t),
        logits,
        tokens,
        temperature,
    )
    assert_same_bits(actual[1:3], whole)


def token_logprob(hidden, head, tokens, temperature):
    return jaxfp4.token_logprob(hidden, head, tokens, temperature=temperature)


@pytest.mark.parametrize("head_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("vocabulary", [512, 8192, 20000])
def test_from_hidden_states(vocabulary, head_dtype):
    """Against fp64; rows alone, in other batches and in other places have the same bits."""
    hidden, head = normal(0, (300, 256), "bf16"), normal(1, (vocabulary, 256), head_dtype, 0.2)
    tokens = tokens_below(vocabulary, (300,))
    temperature = np.linspace(0.5, 2, 300, dtype=np.float32)
    whole = on_gpu(token_logprob, hidden, head, tokens, temperature)
    wide = [np.asarray(x.astype(jnp.bfloat16), np.float64) for x in (hidden, head)]
    with jax.enable_x64(True):
        expected = from_logits(wide[0] @ wide[1].T, tokens, temperature.astype(np.float64)[:, None])
    for actual, wanted in zip(whole, expected, strict=True):
        assert_close(actual, wanted, "logprob")
    for count in (1, 5, 64, 129):
        chosen = np.random.default_rng(count).choice(300, count, replace=False)
        part = on_gpu(
            token_logprob,
            np.asarray(hidden)[chosen],
            head,
            tokens[chosen],
            temperature[chosen],
        )
        for some, every in zip(part, whole, strict=True):
            assert some.tobytes() == every[chosen].tobytes()


def test_from_hidden_states_and_from_logits():
    """The same bits from the product of hidden states and the whole head."""
    hidden, head = normal(0, (130, 256), "bf16"), normal(1, (9000, 256))
    tokens = jnp.asarray(tokens_below(9000, (130,)))
    temperature = jnp.full(130, 0.6, jnp.float32)

    def from_product(hidden, head, tokens, temperature):
        logits = jaxfp4.linear(hidden, head, jaxfp4.UNQUANTIZED, out_dtype=jnp.float32)
        return jaxfp4.logits_logprob(logits, tokens, temperature=temperature)

    direct = on_gpu(token_logprob, hidden, head, tokens, temperature)
    assert_same_bits(direct, on_gpu(from_product, hidden, head, tokens, temperature))


def test_gradients():
    """On the GPU as on the CPU, up to the order of sums and the GPU's fp32 products."""
    hidden, head = normal(0, (60, 128), "bf16"), normal(1, (9000, 128), "bf16", 0.2)
    tokens, temperature = tokens_below(9000, (60,)), np.full(60, 0.8, np.float32)

    def gradients(hidden, head, tokens, temperature):
        def loss(hidden, head):
            logprob, entropy = token_logprob(hidden, head, tokens, temperature)
            return (logprob - 0.1 * entropy).sum()

        return jax.grad(loss, (0, 1))(hidden, head)

    operands = hidden, head, tokens, temperature
    for actual, wanted in zip(
        on_gpu(gradients, *operands), on_cpu(gradients, *operands), strict=True
    ):
        actual, wanted = actual.astype(np.float64), wanted.astype(np.float64)
        assert np.linalg.norm(actual - wanted) <= 0.01 * np.linalg.norm(wanted)
