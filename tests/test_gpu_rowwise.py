"""Row-wise ops and routing on a GPU: the CPU's bytes, and rows that do not depend on their batch.

Where both results are NaN they count as equal: which NaN it is differs between processors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_bits import assert_same_on_both, both_dtypes, needs_gpu, on_gpu, spoiled, values
from row_ops import ROW_OPS, integers, normal

import jaxfp4

pytestmark = needs_gpu

EPS = 1e-6
ROWS = [1, 37, 300]


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@both_dtypes
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [16, 100, 101, 256, 1000, 2048, 2050, 5120, 8192])
def test_rmsnorm(width, rows, dtype):
    x, weight = spoiled(rng(0), (rows, width), dtype), values(rng(1), (width,), jnp.float32)
    assert_same_on_both(lambda x, w: jaxfp4.rmsnorm(x, w, eps=EPS), x, weight)


@both_dtypes
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 16, 75, 96, 768, 2048, 6144])
def test_swiglu(width, rows, dtype):
    assert_same_on_both(jaxfp4.swiglu, spoiled(rng(2), (rows, 2 * width), dtype))


def test_swiglu_of_every_bf16_gate():
    gates = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)).reshape(256, 256)
    for up in (1.0, -3.0, 1e-30, 1e30):
        x = jnp.concatenate([gates, jnp.full_like(gates, up)], axis=1)
        assert_same_on_both(jaxfp4.swiglu, x)


@both_dtypes
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim"),
    [
        (1, 32, 128),
        (37, 1, 128),
        (300, 4, 128),
        (4500, 3, 128),
        (9, 5, 64),
        (70, 2, 256),
        (70, 3, 20),
        (2500, 1, 2),
        (5, 7, 1000),
    ],
)
def test_qk_norm_rope(tokens, heads, head_dim, with_norm, dtype):
    x = spoiled(rng(3), (tokens, heads, head_dim), dtype)
    weight = values(rng(4), (head_dim,), jnp.float32) if with_norm else None
    positions = integers(rng(5), -5, 2**20, (tokens,))
    half = head_dim // 2
    inv_freq = jnp.asarray(1e6 ** (-np.arange(half) / half), jnp.float32)
    assert_same_on_both(
        lambda x, *rest: jaxfp4.qk_norm_rope(x, weight, *rest, eps=EPS), x, positions, inv_freq
    )


def router_logits(rows: int, experts: int) -> jax.Array:
    """Every third row full of ties, one far apart, and others with values that are not finite."""
    x = rng(6, experts).standard_normal((rows, experts), np.float32) * 3
    x[::3] = np.round(x[::3])
    x[1::6] *= 40
    for row, value in zip(range(2, rows, 7), [np.nan, np.inf, -np.inf, 1e-41] * rows, strict=False):
        x[row, rng(row).integers(0, experts, 2)] = value
    x[4::11] = -np.inf
    return jnp.asarray(x)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("experts", "k"), [(5, 1), (8, 8), (60, 4), (128, 8), (200, 40), (512, 16), (5000, 3)]
)
def test_router(experts, k, rows, norm_topk_prob):
    logits = router_logits(rows, experts)
    given = integers(rng(7), -2, experts + 2, (rows, k))

    def chosen(logits):
        return jaxfp4.router_topk(logits, k, norm_topk_prob=norm_topk_prob)

    def replayed(logits, given):
        return jaxfp4.router_topk(logits, k, norm_topk_prob=norm_topk_prob, experts=given)

    assert_same_on_both(chosen, logits)
    assert_same_on_both(replayed, logits, given)


@both_dtypes
@pytest.mark.parametrize(
    ("rows", "k", "y_rows", "width"),
    [
        (1, 8, 8, 2048),  # every slot once
        (300, 8, 2400, 768),
        (37, 3, 100, 100),
        (37, 3, 100, 101),
        (300, 10, 20, 16),  # slots used often
        (2500, 8, 5, 300),  # more uses than a block's list holds
        (9, 1, 20000, 64),  # many slots, few used
        (7500, 8, 100000, 16),  # many slots, some of them used again
        (2048, 8, 16384, 128),
        (5, 2, 40, 10000),
    ],
)
def test_combine_experts_and_its_gradients(rows, k, y_rows, width, dtype):
    y, weights = spoiled(rng(8), (y_rows, width), dtype), values(rng(9), (rows, k), jnp.float32)
    if rows * k == y_rows:
        slots = rng(10).permutation(y_rows).astype(np.int32).reshape(rows, k)
    else:
        slots = np.array(integers(rng(10), -2, y_rows + 2, (rows, k)))
    slots.flat[:1] = [2**31 - 1] if rows > 1 else slots.flat[:1]
    slots.flat[-1:] = [-(2**31)] if rows > 1 else slots.flat[-1:]
    d_out = values(rng(11), (rows, width), dtype)

    def gradients(y, weights, slots, d_out):
        return jax.vjp(lambda y, w: jaxfp4.combine_experts(y, w, slots), y, weights)[1](d_out)

    assert_same_on_both(jaxfp4.combine_experts, y, weights, jnp.asarray(slots))
    assert_same_on_both(gradients, y, weights, jnp.asarray(slots), d_out)


def test_products_at_the_edge_of_the_subnormals():
    """Products just below 2^-126, which round to it, and the neighbours on both sides."""
    steps = np.arange(-40, 41)
    weights = ((1 + np.ldexp(1.0, -13) + steps * 2.0**-23) * 2.0**-63).astype(np.float32)
    y = ((1 - np.ldexp(1.0, -13) + steps * 2.0**-24) * 2.0**-63).astype(np.float32)
    slots = jnp.zeros((len(weights), 1), jnp.int32)
    assert_same_on_both(jaxfp4.combine_experts, jnp.asarray(y[None]), weights[:, None], slots)


ON_GPU = [
    op
    for op in ROW_OPS
    if op.name.startswith(("rmsnorm", "swiglu", "qk_norm_rope", "router", "combine", "logits"))
]


@pytest.mark.parametrize("op", ON_GPU, ids=lambda op: op.name)
@pytest.mark.parametrize("count", [1, 2, 29, 131])
def test_rows_do_not_depend_on_their_batch(op, count):
    rows = op.rows(rng(12), 300)
    whole = on_gpu(op.apply, *rows, *op.shared)
    chosen = rng(13, count).choice(300, count, replace=False)
    part = on_gpu(op.apply, *[np.asarray(row)[chosen] for row in rows], *op.shared)
    for some, every in zip(jax.tree.leaves(part), jax.tree.leaves(whole), strict=True):
        assert some.tobytes() == every[chosen].tobytes()


def test_a_width_of_2048_in_many_rows():
    x, weight = normal(rng(14), (3000, 2048), jnp.bfloat16), normal(rng(15), (2048,), jnp.float32)
    assert_same_on_both(lambda x, w: jaxfp4.rmsnorm(x, w, eps=EPS), x, weight)
