"""Log-probability of a chosen token, with the entropy of its distribution, a row at a time.

    z       = logits / temperature
    lse     = log sum_j exp(z_j)
    logprob = z[token] - lse
    entropy = - sum_j p_j log p_j,   p_j = exp(z_j - lse)

`token_logprob` takes hidden states and the head, and makes the logits a chunk of the vocabulary at
a time, forward and backward: [rows, V] never exists. `logits_logprob` takes logits and gives the
same bits. Both are custom calls whose order is stated in ffi/logprob.h: a row's bits depend on
that row and the head alone. On a GPU the logits of a chunk are a product of its own, on the tensor
cores, which the custom call `logprob_chunk` folds into each row's running sums; chunks are counted
from 0 and of one size whatever the number of rows. Gradients flow from both results:

    dz_j = dlogprob ([j = token] - p_j) - dentropy p_j (log p_j + entropy)

The temperature gets none.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxfp4.batching import over_rows
from jaxfp4.checks import check_array, check_float
from jaxfp4.custom_calls import call, match_varying
from jaxfp4.products import matmul

# Of the vocabulary. The forward's, on a GPU, must be a multiple of ffi/logprob.h's blocks.
_FORWARD_CHUNK = 8192
_LARGEST_CHUNK = 1024  # in the backward


def token_logprob(
    hidden: jax.Array,
    head: jax.Array,
    tokens: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of tokens under softmax(hidden head' / temperature), and the entropy.

    Args:
      hidden: bf16 or fp32 [..., H].
      head: bf16 or fp32 [V, H]. With a bf16 hidden, fp32 masters are rounded to bf16; their
        gradient is fp32.
      tokens: int32 [...]. One outside [0, V) has a NaN logprob.
      temperature: above 0; one number, or fp32 [...].

    Returns:
      logprob and entropy in nats, fp32 [...].
    """
    check_float("hidden", hidden)
    check_float("head", head)
    if head.ndim != 2 or head.shape[1] != hidden.shape[-1] or head.shape[0] == 0:
        raise ValueError(
            f"head must be [V, {hidden.shape[-1]}] beside hidden {hidden.shape}, got {head.shape}"
        )
    if hidden.dtype == jnp.float32 and head.dtype != jnp.float32:
        raise TypeError(f"head must be float32 where hidden is, got {head.dtype}")
    lead = hidden.shape[:-1]
    tokens, temperature = _per_row(tokens, temperature, lead)
    rows = hidden.reshape(math.prod(lead), hidden.shape[-1])
    logprob, entropy = _token_logprob(*match_varying(rows, head, tokens, temperature))
    return logprob.reshape(lead), entropy.reshape(lead)


def logits_logprob(
    logits: jax.Array, tokens: jax.Array, *, temperature: float | jax.Array = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of tokens under softmax(logits / temperature), and the entropy.

    Args:
      logits: fp32 [..., V]. -inf is a token of probability 0.
      tokens: int32 [...]. One outside [0, V) has a NaN logprob.
      temperature: above 0; one number, or fp32 [...].

    Returns:
      logprob and entropy in nats, fp32 [...]; those of token_logprob to the bit where logits are
      linear(hidden, head, UNQUANTIZED, out_dtype=float32).
    """
    if logits.ndim < 1 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have an axis of the vocabulary, got shape {logits.shape}")
    check_array("logits", logits, logits.shape, jnp.float32)
    lead = logits.shape[:-1]
    tokens, temperature = _per_row(tokens, temperature, lead)
    rows = logits.reshape(math.prod(lead), logits.shape[-1])
    logprob, entropy = _logits_logprob(*match_varying(rows, tokens, temperature))
    return logprob.reshape(lead), entropy.reshape(lead)


def _per_row(tokens, temperature, lead):
    """tokens and temperature, checked, as [rows]."""
    check_array("tokens", tokens, lead, jnp.int32)
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    temperature = jnp.asarray(temperature, jnp.float32)
    if temperature.ndim == 0:
        temperature = jnp.broadcast_to(temperature, lead)
    check_array("temperature", temperature, lead, jnp.float32)
    return tokens.reshape(-1), temperature.reshape(-1)


def _dz(z, tokens, lse, entropy, dlogprob, dentropy):
    """The gradient to z [rows, V]; the other operands are [rows], tokens counted from z's first."""
    log_p = z - lse[:, None]
    p = jnp.exp(log_p)
    pull = dlogprob[:, None] + dentropy[:, None] * (log_p + entropy[:, None])
    is_token = tokens[:, None] == jnp.arange(z.shape[1], dtype=jnp.int32)
    # A probability of 0 takes no part, though its logarithm is -inf.
    return jnp.where(is_token, dlogprob[:, None], 0) - jnp.where(p > 0, p * pull, 0)


# --- From logits ---


def _results(rows):
    return [((rows,), jnp.float32)] * 3


_logits_logprob_call = over_rows(
    lambda *operands: tuple(call("logits_logprob", _results(operands[0].shape[0]), *operands))
)


@jax.custom_vjp
def _logits_logprob(logits, tokens, temperature):
    return _logits_logprob_call(logits, tokens, temperature)[:2]


def _logits_logprob_fwd(logits, tokens, temperature):
    logprob, entropy, lse = _logits_logprob_call(logits, tokens, temperature)
    return (logprob, entropy), (logits, tokens, temperature, lse, entropy)


def _logits_logprob_bwd(residuals, cotangents):
    logits, tokens, temperature, lse, entropy = residuals
    dz = _dz(logits / temperature[:, None], tokens, lse, entropy, *cotangents)
    return dz / temperature[:, None], None, None


_logits_logprob.defvjp(_logits_logprob_fwd, _logits_logprob_bwd)


# --- From hidden states and the head ---


def _whole(hidden, head, tokens, temperature):
    """logprob, entropy and lse in one custom call."""
    head = head.astype(hidden.dtype)
    results = _results(hidden.shape[0])
    return tuple(call("token_logprob", results, hidden, head, tokens, temperature))


def _in_chunks(hidden, head, tokens, temperature, chunk=_FORWARD_CHUNK):
    """The same from products over chunks of the head."""
    (rows, _), vocabulary = hidden.shape, head.shape[0]

    def fold(state, first, size):
        """The state and the results after the chunk of `size` that begins at `first`."""
        part = jax.lax.dynamic_slice_in_dim(head, first, size)
        logits = matmul(hidden, part.astype(hidden.dtype), jnp.float32)
        types = [(state.shape, jnp.float32), *_results(rows)]
        return tuple(call("logprob_chunk", types, logits, tokens - first, temperature, state))

    # LogprobState of ffi/logprob.h: the largest z, two sums and the token's z, not met yet.
    state = jnp.tile(jnp.asarray([-jnp.inf, 0, 0, jnp.nan], jnp.float32), (rows, 1))
    carry = (state, *[jnp.zeros((rows,), jnp.float32)] * 3)
    count, rest = divmod(vocabulary, chunk)
    if count:
        firsts = jnp.arange(count, dtype=jnp.int32) * chunk
        carry, firsts, *_ = match_varying(carry, firsts, hidden, head, tokens, temperature)
        carry, _ = jax.lax.scan(lambda c, first: (fold(c[0], first, chunk), None), carry, firsts)
    if rest:
        carry = fold(carry[0], jnp.int32(count * chunk), rest)
    return carry[1:]


@functools.partial(over_rows, shared=(1,))
def _forward(*operands):
    return jax.lax.platform_dependent(*operands, cpu=_whole, cuda=_in_chunks)


@jax.custom_vjp
def _token_logprob(hidden, head, tokens, temperature):
    return _forward(hidden, head, tokens, temperature)[:2]


def _token_logprob_fwd(hidden, head, tokens, temperature):
    logprob, entropy, lse = _forward(hidden, head, tokens, temperature)
    return (logprob, entropy), (hidden, head, tokens, temperature, lse, entropy)


@functools.cache
def _chunk(vocabulary: int) -> int:
    """A chunk that divides the vocabulary if a sensible one does: then no remainder is copied."""
    sizes = range(_LARGEST_CHUNK, _LARGEST_CHUNK // 4, -1)
    return next((size for size in sizes if vocabulary % size == 0), _LARGEST_CHUNK)


def _token_logprob_bwd(residuals, cotangents):
    hidden, head, tokens, temperature, lse, entropy = residuals
    wide = hidden.astype(jnp.float32)

    def add_chunk(dhidden, chunk):
        first, rows = chunk
        rows = rows.astype(hidden.dtype).astype(jnp.float32)
        z = (wide @ rows.T) / temperature[:, None]
        dz = _dz(z, tokens - first, lse, entropy, *cotangents)
        dlogits = dz / temperature[:, None]
        return dhidden + dlogits @ rows, dlogits.T @ wide

    vocabulary, width = head.shape
    size = _chunk(vocabulary)
    count = vocabulary // size
    firsts = jnp.arange(count, dtype=jnp.int32) * size
    zeros, firsts, _ = match_varying(jnp.zeros(wide.shape, jnp.float32), firsts, wide)
    dhidden, dhead = jax.lax.scan(
        add_chunk, zeros, (firsts, head[: count * size].reshape(count, size, width))
    )
    dhead = dhead.reshape(count * size, width)
    if count * size < vocabulary:
        dhidden, rest = add_chunk(dhidden, (count * size, head[count * size :]))
        dhead = jnp.concatenate([dhead, rest])
    return dhidden.astype(hidden.dtype), dhead.astype(head.dtype), None, None


_token_logprob.defvjp(_token_logprob_fwd, _token_logprob_bwd)
