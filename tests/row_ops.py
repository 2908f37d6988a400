"""Every op whose rows must not depend on each other, in one form for the tests of that property.

A RowOp has operands with a leading axis of rows, made by `rows(rng, count)`, and operands that all
rows share (weights). `apply(*rows, *shared)` returns an array or a tuple with the same leading
axis.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp4
from jaxfp4.attention import attention
from jaxfp4.logprob import logits_logprob, token_logprob

Arrays = tuple[jax.Array, ...]
Rng = np.random.Generator

EPS = 1e-6
INV_FREQ = jnp.asarray(1e4 ** (-np.arange(8) / 8), jnp.float32)
EXPERTS, TOP_K = 12, 3


@dataclasses.dataclass(frozen=True, eq=False)
class RowOp:
    name: str
    rows: Callable[[Rng, int], Arrays] = dataclasses.field(repr=False)
    apply: Callable[..., Any] = dataclasses.field(repr=False)
    shared: Arrays = dataclasses.field(default=(), repr=False)


def normal(rng: Rng, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32) * 3).astype(dtype)


def integers(rng: Rng, low: int, high: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(rng.integers(low, high, shape), jnp.int32)


def _weight(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return normal(np.random.default_rng(7), shape, dtype)


def _normals(*widths: int, dtype: Any) -> Callable[[Rng, int], Arrays]:
    return lambda rng, n: tuple(normal(rng, (n, width), dtype) for width in widths)


def _grouped(x, expert, w):
    """grouped_linear on rows of any order: sorted by expert and back."""
    order = jnp.argsort(expert, stable=True)
    sizes = (expert[:, None] == jnp.arange(w.shape[0], dtype=jnp.int32)).sum(0, dtype=jnp.int32)
    return jaxfp4.grouped_linear(x[order], w, sizes)[jnp.argsort(order)]


def _for_dtype(dtype: Any) -> list[RowOp]:
    name = jnp.dtype(dtype).name
    return [
        RowOp(
            f"rmsnorm-{name}",
            _normals(200, dtype=dtype),
            lambda x, w: jaxfp4.rmsnorm(x, w, eps=EPS),
            (_weight((200,)),),
        ),
        RowOp(f"swiglu-{name}", _normals(150, dtype=dtype), jaxfp4.swiglu),
        RowOp(f"residual_add-{name}", _normals(33, 33, dtype=dtype), jaxfp4.residual_add),
        RowOp(
            f"qk_norm_rope-{name}",
            lambda rng, n: (normal(rng, (n, 3, 16), dtype), integers(rng, 0, 40000, (n,))),
            lambda x, p, w: jaxfp4.qk_norm_rope(x, w, p, INV_FREQ, eps=EPS),
            (_weight((16,)),),
        ),
        RowOp(
            f"combine_experts-{name}",
            lambda rng, n: (normal(rng, (n, 3), jnp.float32), integers(rng, -1, 20, (n, 3))),
            lambda weights, slots, y: jaxfp4.combine_experts(y, weights, slots),
            (_weight((19, 70), dtype),),
        ),
        RowOp(
            f"attention-{name}",
            lambda rng, n: (
                normal(rng, (n, 2, 4, 24), dtype),
                normal(rng, (n, 80, 2, 24), dtype),
                normal(rng, (n, 80, 2, 24), dtype),
                integers(rng, 0, 20, (n, 2)),
                integers(rng, 15, 81, (n, 2)),
            ),
            attention,
        ),
        RowOp(
            f"token_logprob-{name}",
            lambda rng, n: (normal(rng, (n, 40), dtype), integers(rng, 0, 700, (n,))),
            lambda hidden, tokens, head: token_logprob(hidden, head, tokens, temperature=0.6),
            (_weight((700, 40)),),
        ),
        RowOp(
            f"linear-unquantized-{name}",
            _normals(64, dtype=dtype),
            lambda x, w: jaxfp4.linear(x, w, jaxfp4.UNQUANTIZED),
            (_weight((20, 64)),),
        ),
        RowOp(
            f"linear-nvfp4-{name}",
            _normals(64, dtype=dtype),
            jaxfp4.linear,
            (_weight((20, 64)),),
        ),
    ]


ROW_OPS = [
    *_for_dtype(jnp.float32),
    *_for_dtype(jnp.bfloat16),
    RowOp(
        "logits_logprob",
        lambda rng, n: (normal(rng, (n, 700), jnp.float32), integers(rng, 0, 700, (n,))),
        lambda logits, tokens: logits_logprob(logits, tokens, temperature=0.6),
    ),
    RowOp(
        "router_topk",
        _normals(EXPERTS, dtype=jnp.float32),
        lambda logits: jaxfp4.router_topk(logits, TOP_K, norm_topk_prob=True),
    ),
    RowOp(
        "grouped_linear-nvfp4",
        lambda rng, n: (normal(rng, (n, 64), jnp.bfloat16), integers(rng, 0, 4, (n,))),
        _grouped,
        (_weight((4, 20, 64)),),
    ),
]
