"""The router's choice and the combination of the experts' outputs against plain fp64 formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp64 import op_value_and_gradients, value_and_gradients
from test_rowwise import both_dtypes, normal
from tolerances import assert_close

import jaxfp4


def chosen_by_numpy(logits, k):
    """The k largest, ties to the lowest index."""
    return np.argsort(-np.asarray(logits), axis=-1, kind="stable")[:, :k].astype(np.int32)


def weights_formula(experts, norm_topk_prob):
    def formula(logits):
        p = jax.nn.softmax(logits, axis=-1)
        weights = jnp.take_along_axis(p, experts, axis=-1)
        return weights / weights.sum(-1, keepdims=True) if norm_topk_prob else weights

    return formula


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize(("num_experts", "k"), [(128, 8), (5, 5), (7, 2)])
def test_router(num_experts, k, norm_topk_prob):
    logits, dweights = normal(0, (40, num_experts), scale=3.0), normal(1, (40, k))
    experts = chosen_by_numpy(logits, k)
    formula = weights_formula(experts, norm_topk_prob)
    expected, (expected_gradient,) = value_and_gradients(formula, [logits], dweights)

    def op(logits):
        return jaxfp4.router_topk(logits, k, norm_topk_prob=norm_topk_prob)

    np.testing.assert_array_equal(op(logits)[1], experts)
    weights, (gradient,) = op_value_and_gradients(lambda x: op(x)[0], [logits], dweights)
    assert_close(weights, expected, "row_fp32")
    assert_close(gradient, expected_gradient, "row_grad_fp32")


def test_ties_go_to_the_lowest_index():
    logits = jnp.asarray([[1, 3, 3, 0, 3], [2, 2, 2, 2, 2]], jnp.float32)
    _, experts = jaxfp4.router_topk(logits, 3, norm_topk_prob=True)
    np.testing.assert_array_equal(experts, [[1, 2, 4], [0, 1, 2]])


def test_equal_probabilities_of_unequal_logits_are_a_tie():
    """Far below the largest, different logits have one probability: zero."""
    _, experts = jaxfp4.router_topk(
        jnp.asarray([[-300, 0, -200]], jnp.float32), 2, norm_topk_prob=False
    )
    np.testing.assert_array_equal(experts, [[1, 0]])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_router_without_finite_weights_chooses_experts_that_exist(bad):
    logits = normal(0, (3, 8)).at[1, 4].set(bad)
    weights, experts = jaxfp4.router_topk(logits, 4, norm_topk_prob=True)
    assert np.isnan(weights[1]).all()
    np.testing.assert_array_equal(experts[1], [0, 1, 2, 3])
    assert np.isfinite(weights[jnp.asarray([0, 2])]).all()


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_replayed_experts(norm_topk_prob):
    logits, dweights = normal(0, (30, 16)), normal(1, (30, 4))
    weights, experts = jaxfp4.router_topk(logits, 4, norm_topk_prob=norm_topk_prob)
    again = jaxfp4.router_topk(logits, 4, norm_topk_prob=norm_topk_prob, experts=experts)
    assert np.asarray(weights).tobytes() == np.asarray(again[0]).tobytes()
    np.testing.assert_array_equal(again[1], experts)

    other = jnp.asarray(np.random.default_rng(2).integers(0, 16, (30, 4)), jnp.int32)
    formula = weights_formula(np.asarray(other), norm_topk_prob)
    expected, (expected_gradient,) = value_and_gradients(formula, [logits], dweights)
    value, (gradient,) = op_value_and_gradients(
        lambda x: jaxfp4.router_topk(x, 4, norm_topk_prob=norm_topk_prob, experts=other)[0],
        [logits],
        dweights,
    )
    assert_close(value, expected, "row_fp32")
    assert_close(gradient, expected_gradient, "row_grad_fp32")


def test_a_replayed_expert_that_does_not_exist_has_weight_zero():
    experts = jnp.asarray([[2, -1, 8, 99]], jnp.int32)
    logits = normal(0, (1, 8))
    weights, _ = jaxfp4.router_topk(logits, 4, norm_topk_prob=True, experts=experts)
    np.testing.assert_array_equal(weights, [[1, 0, 0, 0]])


@both_dtypes
def test_combine(dtype):
    """Slots used once, several times and never, and slots outside of y."""
    rng = np.random.default_rng(0)
    y, weights = normal(1, (25, 70), dtype), normal(2, (12, 3))
    slots = rng.integers(0, 20, (12, 3)).astype(np.int32)
    slots[3] = [-1, 25, 2**30]
    slots[4] = [7, 7, 7]
    inside = (slots >= 0) & (slots < 25)
    dy = normal(3, (12, 70), dtype)

    def formula(y, weights):
        return (jnp.where(inside, weights, 0)[..., None] * y[np.where(inside, slots, 0)]).sum(1)

    def op(y, weights):
        return jaxfp4.combine_experts(y, weights, jnp.asarray(slots))

    expected, expected_gradients = value_and_gradients(formula, [y, weights], dy)
    value, gradients = op_value_and_gradients(op, [y, weights], dy)
    assert_close(value, expected, f"row_{dtype}")
    assert_close(gradients[0], expected_gradients[0], f"row_grad_{dtype}")
    assert_close(gradients[1], expected_gradients[1], "row_grad_fp32")
    assert not np.asarray(value[3], np.float32).any()
    assert not np.asarray(gradients[0][20:], np.float32).any()


def test_combine_under_vmap_keeps_each_element_to_its_own_rows():
    y, weights = normal(1, (3, 6, 8)), normal(2, (3, 4, 2))
    slots = jnp.asarray(np.random.default_rng(0).integers(-1, 8, (3, 4, 2)), jnp.int32)

    def loss(y, weights, slots):
        out = jaxfp4.combine_experts(y, weights, slots)
        return jnp.sin(out).sum(), out

    run = jax.grad(loss, (0, 1), has_aux=True)
    batched = jax.vmap(run)(y, weights, slots)
    for i in range(3):
        one = run(y[i], weights[i], slots[i])
        for a, b in zip(jax.tree.leaves(batched), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(a[i], b)


def test_routing_says_what_is_wrong():
    logits = jnp.zeros((4, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"k must be between 1 and the 8 experts.*got 9"):
        jaxfp4.router_topk(logits, 9, norm_topk_prob=True)
    with pytest.raises(ValueError, match="logits must be float32"):
        jaxfp4.router_topk(logits.astype(jnp.bfloat16), 2, norm_topk_prob=True)
    with pytest.raises(ValueError, match=r"experts must be int32 of shape \(4, 2\)"):
        jaxfp4.router_topk(logits, 2, norm_topk_prob=True, experts=jnp.zeros((4, 3), jnp.int32))
    with pytest.raises(ValueError, match=r"slots must be int32 of shape \(4, 8\)"):
        jaxfp4.combine_experts(logits, logits, jnp.zeros((4, 7), jnp.int32))
    with pytest.raises(ValueError, match=r"y must be \[R, H\]"):
        jaxfp4.combine_experts(logits[0], logits, jnp.zeros((4, 8), jnp.int32))


@pytest.mark.parametrize(
    ("logits", "experts"), [([[0.0, 1.0]], [[2, -1]]), ([[0.0, -200.0]], [[1, 5]])]
)
def test_replayed_experts_without_any_weight(logits, experts):
    def weights(logits):
        return jaxfp4.router_topk(
            logits, 2, norm_topk_prob=True, experts=jnp.asarray(experts, jnp.int32)
        )[0]

    value, pullback = jax.vjp(weights, jnp.asarray(logits, jnp.float32))
    np.testing.assert_array_equal(value, 0.0)
    np.testing.assert_array_equal(pullback(jnp.ones_like(value))[0], 0.0)
