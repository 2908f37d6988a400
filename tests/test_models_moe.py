"""Expert dispatch and the replay of recorded routes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import MOE, Batch, build, sequences

import jaxfp4
from models import Routes, check_routes
from models.moe import dispatch

BATCH = Batch(sequences([9, 12, 1]), left=[3, 0, 5], slots=12)
COTANGENT = np.random.default_rng(3).standard_normal((3, 12, 64)).astype(np.float32)
TOKENS, CHOICES, EXPERTS = 37, 2, 6


@pytest.mark.parametrize("case", ["random", "one expert", "none routed", "ids outside"])
def test_dispatch_sorts_pairs_by_expert(case):
    rng = np.random.default_rng(0)
    experts = rng.integers(0, EXPERTS, (TOKENS, CHOICES)).astype(np.int32)
    if case == "one expert":
        experts[:] = 4
    elif case == "none routed":
        experts[:] = EXPERTS
    elif case == "ids outside":
        experts[::3] = EXPERTS
        experts[1::5, 0] = -1
        experts[2::7, 1] = 1000
    rows, slots, sizes = map(np.asarray, jax.jit(dispatch, static_argnums=1)(experts, EXPERTS))
    assert rows.dtype == slots.dtype == sizes.dtype == np.int32
    routed = (experts >= 0) & (experts < EXPERTS)
    np.testing.assert_array_equal(sizes, [np.sum(experts == e) for e in range(EXPERTS)])
    assert sizes.sum() == routed.sum()
    expected = [(e, t) for e in range(EXPERTS) for t in range(TOKENS) for c in experts[t] if c == e]
    np.testing.assert_array_equal(rows[: len(expected)], [token for _, token in expected])
    assert (slots[~routed] == experts.size).all()
    group = np.repeat(np.arange(EXPERTS), sizes)
    np.testing.assert_array_equal(group[slots[routed]], experts[routed])
    tokens = np.broadcast_to(np.arange(TOKENS)[:, None], experts.shape)
    np.testing.assert_array_equal(rows[slots[routed]], tokens[routed])
    assert len(set(slots[routed].tolist())) == routed.sum()


@pytest.fixture(scope="module")
def replayable():
    """A jitted fp32 forward pass, its parameters, and its output on BATCH."""
    with jax.numpy_dtype_promotion("strict"):
        model = build(MOE, jaxfp4.Policy(), dtype=jnp.float32)
        graphdef, state = nnx.split(model, nnx.Param)

        @jax.jit
        def forward(state, routes, cotangent):
            def loss(state):
                model = nnx.merge(graphdef, state)
                output = model(BATCH.tokens, start=BATCH.start, end=BATCH.end, routes=routes)
                return jnp.sum(output.hidden * cotangent), output

            (_, output), gradients = jax.value_and_grad(loss, has_aux=True)(state)
            return output, gradients

        output, gradients = forward(state, None, COTANGENT)
        return forward, state, output, gradients


def check(routes):
    check_routes(MOE, routes, start=BATCH.start, end=BATCH.end)


def test_replayed_routes_give_the_same_bits(replayable):
    forward, state, output, gradients = replayable
    assert output.routes.layers.tolist() == [0, 1]
    assert output.routes.experts.shape == (2, 3, 12, 2)
    check(output.routes)
    padding = np.asarray(BATCH.tokens) < 0
    assert (np.asarray(output.routes.experts)[:, padding] == MOE.num_experts).all()
    # The ids of padding are free: the same one for all does not overfill its expert.
    free = jnp.where(padding[None, ..., None], 0, output.routes.experts)
    again, replayed_gradients = forward(state, Routes(output.routes.layers, free), COTANGENT)
    np.testing.assert_array_equal(again.hidden, output.hidden)
    np.testing.assert_array_equal(again.routes.experts, output.routes.experts)
    for a, b in zip(jax.tree.leaves(replayed_gradients), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(gradients["moe"]["router"][...]).max() > 1e-3


def test_padding_gives_no_gradient(replayable):
    forward, state, _, gradients = replayable
    cotangent = np.where((np.asarray(BATCH.tokens) < 0)[..., None], np.nan, COTANGENT)
    _, again = forward(state, None, cotangent.astype(np.float32))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_routes_are_followed(replayable):
    forward, state, output, _ = replayable
    other = (output.routes.experts + 1) % MOE.num_experts
    again, gradients = forward(state, Routes(output.routes.layers, other), COTANGENT)
    for row in BATCH.real(again.hidden - output.hidden):
        assert np.abs(row).max() > 1e-3
    real = np.asarray(BATCH.tokens) >= 0
    np.testing.assert_array_equal(
        np.asarray(again.routes.experts)[:, real], np.asarray(other)[:, real]
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_routes_of_layers_in_another_order_are_refused(replayable):
    routes = replayable[2].routes
    swapped = jax.tree.map(lambda table: table[::-1], routes)
    with pytest.raises(ValueError, match=r"layers \[1, 0\].*\[0, 1\]"):
        check(swapped)


@pytest.mark.parametrize(
    ("ids", "message"),
    [((1, 1), "twice"), ((0, 6), r"outside \[0, 6\)"), ((-1, 2), r"outside \[0, 6\)")],
)
def test_illegal_ids_are_refused_for_real_tokens_alone(replayable, ids, message):
    routes = replayable[2].routes
    experts = np.array(routes.experts)
    experts[1, 0, 0] = ids
    check(dataclasses.replace(routes, experts=experts))
    experts[1, 0, 4] = ids
    with pytest.raises(ValueError, match=f"layer 1, row 0, token 4 .*{message}"):
        check(dataclasses.replace(routes, experts=experts))


def test_routes_of_another_shape_are_refused(replayable):
    routes = replayable[2].routes
    for cut in (routes.experts[:, :2], routes.experts[..., :1]):
        with pytest.raises(ValueError, match="shape"):
            check(dataclasses.replace(routes, experts=cut))
