"""A token's hidden state has the same bits however the call that computed it was cut."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import DENSE, MOE, Batch, build, sequences

import jaxfp4
from jaxfp4 import policy
from models import Qwen3

BATCH = Batch(sequences([9, 12, 1, 10]), left=[3, 0, 5, 2], slots=12)
# The last layer of "nvfp4" is unquantised: the layers are cut into two scans.
CASES = {
    "dense nvfp4": (DENSE, policy.last_layers_unquantized(3)),
    "dense unquantised": (DENSE, policy.none()),
    "moe nvfp4": (MOE, policy.all_linears()),
    "moe unquantised": (MOE, policy.none()),
}


@dataclasses.dataclass(frozen=True)
class Case:
    graphdef: nnx.GraphDef
    state: nnx.State
    prepared: tuple
    hidden: list[np.ndarray]
    routes: list[np.ndarray] | None

    def check(self, batch: Batch, output, rows) -> None:
        """Asserts that row i of the output is row rows[i] of the case."""
        for row, hidden in zip(rows, batch.real(output.hidden), strict=True):
            np.testing.assert_array_equal(hidden, self.hidden[row], err_msg=f"row {row}")
        if self.routes is not None:
            experts = jnp.moveaxis(output.routes.experts, 0, 2)
            for row, chosen in zip(rows, batch.real(experts), strict=True):
                np.testing.assert_array_equal(chosen, self.routes[row], err_msg=f"row {row}")


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, state, tokens, start, end, prepared=None, cache=None, offset=None):
    model = nnx.merge(graphdef, state)
    return model(tokens, start=start, end=end, prepared=prepared, cache=cache, offset=offset)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    config, layers = CASES[request.param]
    with jax.numpy_dtype_promotion("strict"):
        model = build(config, layers)
        graphdef, state = nnx.split(model, nnx.Param)
        prepared = jax.jit(lambda state: nnx.merge(graphdef, state).prepare())(state)
        output = forward(graphdef, state, BATCH.tokens, BATCH.start, BATCH.end, prepared=prepared)
        hidden = BATCH.real(output.hidden)
        assert all(np.isfinite(row.astype(np.float32)).all() for row in hidden)
        routes = None
        if output.routes is not None:
            routes = BATCH.real(jnp.moveaxis(output.routes.experts, 0, 2))
        return Case(graphdef, state, prepared, hidden, routes)


def test_each_sequence_alone_and_in_other_slots(case):
    for row, tokens in enumerate(BATCH.sequences):
        alone = Batch([tokens], left=[(5 * row) % (18 - len(tokens))], slots=17)
        output = forward(
            case.graphdef, case.state, alone.tokens, alone.start, alone.end, case.prepared
        )
        case.check(alone, output, [row])


def test_other_rows_and_order(case):
    rows = [3, 1, 0, 2]
    batch = Batch([BATCH.sequences[row] for row in rows], left=[0, 0, 2, 11], slots=12)
    output = forward(case.graphdef, case.state, batch.tokens, batch.start, batch.end, case.prepared)
    case.check(batch, output, rows)


def test_weights_quantised_in_the_call(case):
    output = forward(case.graphdef, case.state, BATCH.tokens, BATCH.start, BATCH.end)
    case.check(BATCH, output, range(4))


def test_prefill_and_decoding_with_a_cache(case):
    slots, prompt = 15, 6
    cache = nnx.merge(case.graphdef, case.state).init_cache(4, slots)
    hidden, routes, offset = [], [], jnp.int32(0)
    for first in (0, *range(prompt, BATCH.slots)):
        tokens = BATCH.tokens[:, first : first + (prompt if first == 0 else 1)]
        output = forward(
            case.graphdef,
            case.state,
            tokens,
            BATCH.start,
            BATCH.end,
            case.prepared,
            cache,
            offset,
        )
        cache, offset = output.cache, offset + tokens.shape[1]
        hidden.append(output.hidden)
        routes.append(output.routes)
    output = output._replace(hidden=jnp.concatenate(hidden, 1))
    if case.routes is not None:
        experts = jnp.concatenate([r.experts for r in routes], 2)
        output = output._replace(routes=dataclasses.replace(routes[0], experts=experts))
    case.check(BATCH, output, range(4))
    # Nothing is written at padding or past the last token.
    written = np.asarray(cache.k).any(axis=(0, 3, 4))
    slot = np.arange(slots)
    start, end = np.asarray(BATCH.start)[:, None], np.asarray(BATCH.end)[:, None]
    np.testing.assert_array_equal(written, (start <= slot) & (slot < end))
    # Nor over earlier keys by a row that has ended.
    ended = forward(
        case.graphdef,
        case.state,
        BATCH.tokens[:, :1],
        BATCH.start,
        BATCH.start,
        case.prepared,
        cache,
        jnp.int32(5),
    )
    np.testing.assert_array_equal(ended.cache.k, cache.k)
    np.testing.assert_array_equal(ended.cache.v, cache.v)


# Compiling takes long: one model without remat will do.
@pytest.mark.parametrize(
    ("case", "remat"),
    [*((name, "block") for name in CASES), ("moe nvfp4", "none")],
    indirect=["case"],
)
def test_forward_under_grad(case, remat):
    model = nnx.merge(case.graphdef, case.state)
    model.remat = remat
    graphdef, _ = nnx.split(model, nnx.Param)

    @jax.jit
    def gradient(state, tokens, start, end, prepared):
        def loss(state):
            model = nnx.merge(graphdef, state)
            output = model(tokens, start=start, end=end, prepared=prepared)
            logprob, _ = model.token_logprob(output.hidden, jnp.maximum(tokens, 0))
            return jnp.sum(jnp.where(tokens >= 0, logprob, 0.0)), output

        return jax.grad(loss, has_aux=True)(state)

    gradients, output = gradient(case.state, BATCH.tokens, BATCH.start, BATCH.end, case.prepared)
    case.check(BATCH, output, range(4))
    for path, leaf in nnx.to_flat_state(gradients):
        assert leaf.dtype == jnp.float32
        assert np.isfinite(leaf[...]).all(), path
        assert np.abs(leaf[...]).max() > 0, path


def test_a_change_of_recipe_keeps_the_parameters():
    trees = []
    for layers in (policy.none(), policy.last_layers_unquantized(2), policy.experts_only()):
        model = nnx.eval_shape(lambda layers=layers: build(MOE, layers))
        trees.append(jax.tree.map(jnp.shape, nnx.state(model, nnx.Param)))
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.parametrize(
    ("config", "layers", "cuts"),
    [
        (DENSE, policy.all_linears(), [(0, 3)]),
        (DENSE, policy.last_layers_unquantized(3), [(0, 2), (2, 3)]),
        (MOE, policy.experts_only(), [(0, 2)]),
        (dataclasses.replace(MOE, mlp_only_layers=(0,)), policy.none(), [(0, 1), (1, 2)]),
        (dataclasses.replace(DENSE, num_hidden_layers=40), policy.all_linears(), [(0, 40)]),
        (
            DENSE,
            jaxfp4.Policy([jaxfp4.Rule("layers.1.mlp.*", jaxfp4.NVFP4)]),
            [(0, 1), (1, 2), (2, 3)],
        ),
    ],
)
def test_runs_are_maximal(config, layers, cuts):
    model = nnx.eval_shape(lambda: build(config, layers))
    assert [(run.first, run.last) for run in model.runs] == cuts
    prepared = nnx.eval_shape(Qwen3.prepare, model)
    for run, quantized in zip(model.runs, prepared, strict=True):
        for recipe, weight in zip(run.recipes, quantized, strict=True):
            assert (weight is None) == (recipe == jaxfp4.UNQUANTIZED)
            assert weight is None or weight.shape[0] == run.last - run.first


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.qkv_proj has rows of 40"):
        build(dataclasses.replace(DENSE, hidden_size=40), policy.all_linears())
    with pytest.raises(ValueError, match="decides for no layer"):
        build(DENSE, policy.experts_only())
    with pytest.raises(ValueError, match="remat='layer'"):
        build(DENSE, policy.none(), remat="layer")
    model = build(DENSE, policy.none())
    tokens, rows = jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match="offset"):
        model(tokens, start=rows, end=rows + 3, offset=jnp.int32(0))
    cache = model.init_cache(2, 8)
    with pytest.raises(ValueError, match=r"offset has shape \(2,\)"):
        model(tokens, start=rows, end=rows + 3, cache=cache, offset=rows)
    with pytest.raises(ValueError, match=r"offset=6: 3 tokens from there .* 8 slots"):
        model(tokens, start=rows, end=rows + 8, cache=cache, offset=jnp.int32(6))
    with pytest.raises(ValueError, match="start has shape"):
        model(tokens, start=rows[:1], end=rows + 3)
    with pytest.raises(ValueError, match="cache holds 3 rows"):
        model(tokens, start=rows, end=rows + 3, cache=model.init_cache(3, 8))
    with pytest.raises(ValueError, match="prepared has 2 runs"):
        model(tokens, start=rows, end=rows + 3, prepared=model.prepare() * 2)


def test_a_cache_is_changed_in_place():
    """Its rounding to fp32 and back, or a copy in a loop, would take a multiple of its memory."""
    model = build(MOE, policy.none())
    graphdef, state = nnx.split(model, nnx.Param)
    rows = jnp.zeros(2, jnp.int32)
    cache = jax.eval_shape(lambda: model.init_cache(2, 100_000))

    def decode(state, cache, tokens):
        def step(t, carry):
            cache, tokens = carry
            model = nnx.merge(graphdef, state)
            out = model(tokens, start=rows, end=rows + t + 1, cache=cache, offset=t)
            return out.cache, tokens + out.hidden[:, :1, 0].astype(jnp.int32)

        return jax.lax.fori_loop(0, 5, step, (cache, tokens))

    tokens = jnp.ones((2, 1), jnp.int32)
    used = jax.jit(decode, donate_argnums=1).lower(state, cache, tokens).compile()
    memory = used.memory_analysis()
    assert memory is not None
    # What a layer reads of it may be copied: one of the model's two.
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < 0.75 * whole


def test_a_cache_has_no_derivative():
    model = build(DENSE, policy.none())
    graphdef, state = nnx.split(model, nnx.Param)
    start = jnp.zeros(2, jnp.int32)

    def loss(state):
        model = nnx.merge(graphdef, state)
        tokens, cache = jnp.ones((2, 3), jnp.int32), model.init_cache(2, 4)
        return model(tokens, start=start, end=start + 3, cache=cache).hidden.sum(dtype=jnp.float32)

    assert np.isfinite(loss(state))
    with pytest.raises(NotImplementedError, match="without a cache to differentiate"):
        jax.grad(loss)(state)
