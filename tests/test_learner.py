"""The optimiser step: how the batch is cut, what it refuses, and what it leaves alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from policies import PAD, learner, made_up_rollout, split, weights

from train.config import Optimizer
from train.grpo import LossConfig
from train.learner import Batch, TrainState, learning_rate, make_optimizer

# Eight completions of 1 to 200 tokens.
COMPLETIONS = [1, 200, 7, 40, 3, 120, 66, 12]
ADVANTAGES = [0.5, 2.0, 0.25, 1.5, -0.75, 1.0, -0.5, -1.0]


def batch(completions: list[int], limit: int | None = None, **changes) -> Batch:
    rollout = made_up_rollout(completions, limit=limit)
    rows = len(completions)
    advantages = jnp.asarray((ADVANTAGES * rows)[:rows], jnp.float32)
    return dataclasses.replace(Batch(rollout, advantages, jnp.ones(rows, bool)), **changes)


def fresh(learner_, kind: str = "moe", recipe: str = "nvfp4") -> TrainState:
    """A state whose buffers no other test holds: a step donates them."""
    return learner_.init(jax.tree.map(jnp.copy, split(kind, recipe)[1]))


def distance(a, b) -> float:
    """|a - b| / |b| of two trees, in fp64."""
    both = [
        (np.asarray(x, np.float64), np.asarray(y, np.float64))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    ]
    difference = sum(np.sum((x - y) ** 2) for x, y in both)
    return float(np.sqrt(difference / sum(np.sum(y**2) for _, y in both)))


@functools.cache
def cut(aggregation: str, micro_batch: int):
    """Loss, first moments (the clipped gradient, times 1 - beta1) and parameters after a step."""
    loss = LossConfig(aggregation=aggregation)
    kind = ("moe", "nvfp4") if aggregation == "token-mean" else ("dense", "nvfp4")
    trainer = learner(*kind, loss=loss, micro_batch=micro_batch, max_new_tokens=200)
    state, metrics, _ = trainer.update(fresh(trainer, *kind), batch(COMPLETIONS))
    return metrics["policy/loss"], state.optimizer[1][0].mu, state.weights.params


@pytest.mark.parametrize(
    ("aggregation", "micro_batch"),
    [
        ("token-mean", 1),
        ("token-mean", 2),
        ("token-mean", 4),
        ("token-mean", 3),
        ("sequence-mean", 3),
        ("constant-length", 3),
    ],
)
def test_a_step_does_not_depend_on_how_the_batch_is_cut(aggregation, micro_batch):
    loss, moments, params = cut(aggregation, micro_batch)
    whole_loss, whole_moments, whole_params = cut(aggregation, 8)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-6)
    assert distance(moments, whole_moments) <= 1e-6
    assert distance(params, whole_params) <= 1e-6


@pytest.fixture(scope="module")
def trainer():
    return learner()


def rows(completions=(3, 6, 1, 4), **changes) -> Batch:
    return batch(list(completions), limit=6, **changes)


NOTHING_LEFT = {
    "groups of equal rewards": lambda: rows(
        advantages=jnp.zeros(4, jnp.float32), learned=jnp.zeros(4, bool)
    ),
    "advantages of zero": lambda: rows(advantages=jnp.zeros(4, jnp.float32)),
    "empty completions": lambda: rows((0, 0, 0, 0)),
}
NOT_FINITE = {
    "infinite advantage": lambda: rows(advantages=jnp.asarray([1, jnp.inf, -1, 0], jnp.float32)),
    "NaN advantage": lambda: rows(advantages=jnp.asarray([1, jnp.nan, -1, 0], jnp.float32)),
}


@pytest.mark.parametrize("case", [*NOTHING_LEFT, *NOT_FINITE])
def test_a_step_with_nothing_to_learn_changes_nothing_and_is_counted(trainer, case):
    # One step before, so that the moments are not zero and would move the parameters.
    state, *_ = trainer.update(fresh(trainer), rows())
    before = jax.tree.map(np.asarray, state)
    assert before.steps == 1
    state, metrics, _ = trainer.update(state, (NOTHING_LEFT | NOT_FINITE)[case]())
    assert int(state.skipped) == float(metrics["optimizer/skipped"]) == 1
    expected = dataclasses.replace(before, skipped=np.int32(1))
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        # Bytes: moments and NaN-free codes alike.
        name = jax.tree_util.keystr(path)
        want = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        assert np.asarray(leaf).tobytes() == want.tobytes(), name
    if case in NOTHING_LEFT:
        assert metrics["policy/loss"] == metrics["optimizer/gradient_norm"] == 0
        assert all(np.isfinite(value) for value in metrics.values())
    # The next ordinary step is taken.
    state, *_ = trainer.update(state, rows())
    assert (state.steps, state.skipped) == (2, 1)


def test_rows_that_are_not_learned_count_nowhere(trainer):
    """The step on six rows of which two are left out equals the step on the four alone."""
    full = rows((3, 6, 1, 4, 5, 2))
    keep = jnp.asarray([True, True, True, True, False, False])
    left_out = dataclasses.replace(
        full, learned=keep, advantages=jnp.where(keep, full.advantages, 9.0)
    )
    alone = dataclasses.replace(
        full,
        rollout=full.rollout.rows(np.arange(4)),
        advantages=full.advantages[:4],
        learned=keep[:4],
    )
    results = [trainer.update(fresh(trainer), b) for b in (left_out, alone)]
    np.testing.assert_allclose(*(m["policy/loss"] for _, m, _ in results), rtol=1e-6)
    assert distance(results[0][0].optimizer[1][0].mu, results[1][0].optimizer[1][0].mu) <= 1e-6


def test_stop_and_padding_tokens_inside_a_completion_are_learned(trainer):
    """What counts is the mask: one token id serves as padding, as stop, and inside the text."""
    plain = rows()
    tokens = plain.rollout.tokens
    # Row 1 is a full completion with the padding id in its middle and at its end.
    tokens = tokens.at[1, jnp.asarray([7, 10])].set(PAD)
    outside = np.asarray(~plain.rollout.mask).copy()
    outside[:, :5] = False
    for filler in (PAD, 5):
        filled = jnp.where(jnp.asarray(outside), filler, tokens)
        changed = dataclasses.replace(
            plain, rollout=dataclasses.replace(plain.rollout, tokens=filled)
        )
        _, metrics, logprob = trainer.update(fresh(trainer), changed)
        assert (np.asarray(logprob)[1, 5:] < 0).all()
        assert (np.asarray(logprob)[outside] == 0).all()
        if filler == PAD:
            first = metrics
    assert metrics["policy/loss"] == first["policy/loss"]
    assert metrics["optimizer/gradient_norm"] == first["optimizer/gradient_norm"]


def test_the_step_is_that_of_explicit_gradients(trainer):
    """Against jax.grad of a loss written out here, and Adam's first step by hand."""
    graphdef, params = split("moe", "nvfp4")
    step = rows()
    r, tokens = step.rollout, float(step.rollout.mask.sum())

    @jax.jit
    def gradient(p):
        def loss(p):
            model = nnx.merge(graphdef, p)
            hidden = model(r.tokens, start=r.start, end=r.end).hidden
            every = jax.nn.log_softmax(model.logits(hidden)[:, :-1])
            logprob = jnp.take_along_axis(every, r.tokens[:, 1:, None], axis=-1)[..., 0]
            # On policy the gradient of the ratio is that of the log-prob.
            weighted = logprob * step.advantages[:, None]
            return -jnp.where(r.mask[:, 1:], weighted, 0.0).sum() / tokens

        return jax.grad(loss)(p)

    expected = gradient(params)
    norm = np.sqrt(
        sum(float(jnp.sum(g.astype(jnp.float32) ** 2)) for g in jax.tree.leaves(expected))
    )
    state, metrics, _ = trainer.update(fresh(trainer), step)
    np.testing.assert_allclose(metrics["optimizer/gradient_norm"], norm, rtol=5e-3)
    scale = 0.1 * min(1.0, 1.0 / norm)
    moments = state.optimizer[1][0].mu
    assert distance(moments, jax.tree.map(lambda g: scale * g, expected)) <= 2e-2
    assert all(
        leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((moments, state.weights.params))
    )
    moved = jax.tree.map(lambda new, old: new - old, state.weights.params, params)
    # Adam's first step is learning_rate * sign(g) wherever |g| is far above epsilon.
    largest = max(float(jnp.abs(m).max()) for m in jax.tree.leaves(moved))
    np.testing.assert_allclose(largest, 1e-2, rtol=1e-3)


def test_supervised_steps_raise_the_likelihood(trainer):
    rollout = made_up_rollout([3, 6, 1, 4], limit=6)
    state = fresh(trainer)
    losses = []
    for _ in range(10):
        state, metrics = trainer.supervised_update(state, rollout)
        losses.append(float(metrics["policy/loss"]))
    mean = -np.asarray(trainer.score(weights(), rollout)[0]).sum() / 14
    np.testing.assert_allclose(losses[0], mean, rtol=1e-5)
    assert losses[-1] < losses[0] - 0.5


def test_warm_up_and_decay():
    config = Optimizer(learning_rate=0.4, warmup_steps=3)
    np.testing.assert_allclose(
        [learning_rate(config)(i) for i in range(6)], [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rtol=1e-6
    )
    # Without a gradient only weight decay moves anything, and no norm or bias.
    params = {"proj": jnp.ones((2, 2)), "q_norm": jnp.ones((2, 2)), "qkv_bias": jnp.ones((2, 2))}
    optimizer = make_optimizer(Optimizer(learning_rate=0.1, weight_decay=0.5))
    zero = jax.tree.map(jnp.zeros_like, params)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(updates["proj"], -0.05, rtol=1e-6)
    assert not updates["q_norm"].any()
    assert not updates["qkv_bias"].any()
