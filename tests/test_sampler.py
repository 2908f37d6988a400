"""The sampler: where rows stop, what they are drawn from, and that rows do not see each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policies import PAD, VOCABULARY, keys, prompts, sampler, split, weights

import jaxfp4
from train.config import Sampling
from train.rollout import Rollout, left_pad
from train.sampler import _generate, draw_tokens
from train.weights import Weights, prepare, weight_hash

LENGTHS = [3, 7, 1, 5]
LIMIT = 6


@pytest.fixture(scope="module")
def policy() -> Weights:
    return weights()


@pytest.fixture(scope="module")
def unstopped(policy) -> Rollout:
    """Four rows that no stop token ends: all draws of their keys."""
    return sampler()(policy, *prompts(LENGTHS), keys(range(4)))


def check_layout(rollout: Rollout, drawn: np.ndarray, stop_ids: tuple[int, ...], slots: int):
    """Against plain Python over the draws i32[N, R] that an unstopped run makes."""
    limit = drawn.shape[1]
    for row, tokens in enumerate(drawn.tolist()):
        stops = [i for i, token in enumerate(tokens) if token in stop_ids]
        length = stops[0] + 1 if stops else limit
        assert rollout.end[row] == slots + length
        assert bool(rollout.finished[row]) == bool(stops)
        assert rollout.completions()[row] == tokens[:length]
        mask = [False] * slots + [True] * length + [False] * (limit - length)
        assert rollout.mask[row].tolist() == mask
        assert (np.asarray(rollout.tokens[row, slots + length :]) == PAD).all()
        logprob = np.asarray(rollout.logprob[row])
        assert (logprob[~np.asarray(mask)] == 0).all()
        assert (logprob[mask] < 0).all()
    assert rollout.tokens.shape == (len(drawn), slots + limit)


@pytest.mark.parametrize(
    "stops_of",
    [
        pytest.param(lambda d: (d[0, 0], -1), id="first token"),
        pytest.param(lambda d: (d[1, LIMIT - 1], -1), id="last slot"),
        pytest.param(lambda d: (d[2, 2], d[3, 3]), id="two stop tokens"),
        pytest.param(lambda d: tuple(d[:2, 0]), id="two rows at once"),
        pytest.param(lambda d: (-1, -1), id="length limit"),
    ],
)
def test_rows_end_at_the_first_stop_token_or_at_the_limit(policy, unstopped, stops_of):
    drawn = np.asarray(unstopped.tokens[:, 7:])
    stop_ids = tuple(int(i) for i in stops_of(drawn))
    rollout = sampler(stop_ids=stop_ids)(policy, *prompts(LENGTHS), keys(range(4)))
    check_layout(rollout, drawn, stop_ids, 7)
    kept = np.asarray(rollout.mask)
    np.testing.assert_array_equal(rollout.logprob, np.where(kept, unstopped.logprob, 0))


def test_all_rows_stop_at_once(policy):
    every = tuple(range(VOCABULARY))
    rollout = sampler(stop_ids=every)(policy, *prompts(LENGTHS), keys(range(4)))
    assert (np.asarray(rollout.mask).sum(axis=1) == 1).all()
    assert np.asarray(rollout.finished).all()


@pytest.mark.parametrize("limit", [1, 2])
def test_batch_of_one_with_a_short_limit(policy, unstopped, limit):
    tokens, start = prompts(LENGTHS)
    drawn = np.asarray(unstopped.tokens[1:2, 7 : 7 + limit])
    short = sampler(max_new_tokens=limit)
    for stop_ids in ((-1, -1), (int(drawn[0, 0]), -1), (int(drawn[0, -1]), -1)):
        stopping = dataclasses.replace(short, stop_ids=stop_ids)
        check_layout(stopping(policy, tokens[1:2], start[1:2], keys([1])), drawn, stop_ids, 7)


def test_a_row_does_not_depend_on_its_batch(policy, unstopped):
    """Alone, in another order, with other padding and beside other requests: the same bits."""
    tokens, start = prompts(LENGTHS)
    order = [2, 0, 3, 1]
    shuffled = sampler()(policy, tokens[order], start[order], keys(order))
    for name in ("tokens", "logprob"):
        expected = np.asarray(getattr(unstopped, name))[order]
        np.testing.assert_array_equal(getattr(shuffled, name), expected, err_msg=name)
    # Row 0 is a prompt of 3 tokens: alone without padding, and beside a prompt of 200 tokens.
    prompt = tokens[0, start[0] :].tolist()
    long = np.random.default_rng(0).integers(1, VOCABULARY, 200).tolist()
    alone = sampler()(policy, *left_pad([prompt], 3, PAD), keys([0]))
    beside = sampler()(policy, *left_pad([long, prompt], 200, PAD), keys([9, 0]))
    for name in ("tokens", "logprob"):
        expected = np.asarray(getattr(unstopped, name))[0, 7:]
        np.testing.assert_array_equal(getattr(alone, name)[0, 3:], expected, err_msg=name)
        np.testing.assert_array_equal(getattr(beside, name)[1, 200:], expected, err_msg=name)


def test_completions_of_a_group_are_requests_of_their_own(policy, unstopped):
    """The shared prefill gives each of them the bits that the prompt in a row of its own gets."""
    tokens, start = prompts(LENGTHS)
    rollout = sampler()(policy, tokens[:2], start[:2], keys([0, 5, 1, 6]), 2)
    np.testing.assert_array_equal(rollout.tokens[::2], unstopped.tokens[:2])
    np.testing.assert_array_equal(rollout.logprob[::2], unstopped.logprob[:2])
    assert (np.asarray(rollout.tokens[0]) != np.asarray(rollout.tokens[1])).any()
    assert (np.asarray(rollout.tokens[:2, :7]) == tokens[0]).all()


@pytest.mark.parametrize("group", [1, 2])
def test_drawing_in_pieces_changes_nothing(policy, group):
    # Five prompts, two at a time: the last piece is filled up.
    given = *prompts([3, 7, 1, 5, 2]), keys(range(5 * group))
    pieces = sampler(micro_batch=2 * group)(policy, *given, group)
    for ours, theirs in zip(
        jax.tree.leaves(pieces), jax.tree.leaves(sampler()(policy, *given, group)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_greedy_takes_the_most_likely_token_beside_any_other_row(policy):
    prompt, long = [4, 9, 2], list(range(1, 29)) * 7
    greedy = sampler(temperature=0.0)
    alone = greedy(policy, *left_pad([prompt], 3, PAD), keys([0]))
    beside = greedy(policy, *left_pad([prompt, long], 196, PAD), keys([1, 2]))
    np.testing.assert_array_equal(alone.tokens[0, 3:], beside.tokens[0, 196:])
    np.testing.assert_array_equal(alone.logprob[0, 3:], beside.logprob[0, 196:])
    logits = jnp.asarray([[0.5, 3.0, 3.0, -1.0]], jnp.float32)
    token, logprob = draw_tokens(logits, keys([0]), Sampling(1, temperature=0.0))
    assert token.tolist() == [1]
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(logits)[0, 1], rtol=1e-6)


def kept_by_hand(p: np.ndarray, top_k: int | None, top_p: float) -> np.ndarray:
    """The renormalised probabilities of the tokens that top_k and then top_p keep, in fp64."""
    order = np.argsort(-p, kind="stable")
    kept = np.zeros(len(p))
    kept[order[: top_k or len(p)]] = p[order[: top_k or len(p)]]
    kept /= kept.sum()
    total = 0.0
    for token in order:
        if total >= top_p:
            kept[token] = 0.0
        total += kept[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, None, 1.0), (0.6, None, 1.0), (1.5, 3, 1.0), (1.0, None, 0.7), (0.6, 4, 0.9)],
)
def test_draws_and_log_probs_are_those_of_the_distribution(temperature, top_k, top_p):
    logits = np.array([1.2, -0.3, 0.4, 2.0, 0.4, -3.0, 0.9], np.float32)
    p = np.exp(logits.astype(np.float64) / temperature)
    expected = kept_by_hand(p / p.sum(), top_k, top_p)
    draws = 20_000
    settings = Sampling(1, temperature, top_k, top_p)
    token, logprob = draw_tokens(
        jnp.broadcast_to(jnp.asarray(logits), (draws, 7)), keys(range(draws)), settings
    )
    counts = np.bincount(token, minlength=7)
    assert (counts[expected == 0] == 0).all()
    # Five standard deviations of each count.
    error = np.abs(counts - draws * expected)
    assert (error <= 5 * np.sqrt(draws * expected * (1 - expected)) + 1e-9).all()
    np.testing.assert_allclose(logprob, np.log(expected[np.asarray(token)]), rtol=1e-5, atol=1e-6)


def test_other_steps_and_requests_draw_other_tokens(policy, unstopped):
    for other in (keys(range(4), step=1), keys(range(4, 8))):
        rollout = sampler()(policy, *prompts(LENGTHS), other)
        same = np.asarray(rollout.tokens) == np.asarray(unstopped.tokens)
        assert same[:, :7].all()
        assert not same[:, 7:].all(axis=1).any()


def test_no_state_survives_an_update_of_the_weights(policy, unstopped):
    """Sample, push 4 W, sample, push W, sample: each as after a cold start, fingerprints equal."""
    graphdef, params = split("moe", "nvfp4")
    four = jax.tree.map(lambda p: 4 * p, params)
    hashes, rollouts = [], []
    for pushed in (params, four, params):
        current = prepare(pushed, graphdef=graphdef)
        hashes.append(weight_hash(current))
        again = Weights(pushed, jax.jit(lambda p: _prepared(graphdef, p))(pushed))
        assert weight_hash(again) == hashes[-1]
        rollouts.append(sampler()(current, *prompts(LENGTHS), keys(range(4))))
    assert hashes[0] == hashes[2] != hashes[1]
    for first, third, expected in zip(
        jax.tree.leaves(rollouts[0]),
        jax.tree.leaves(rollouts[2]),
        jax.tree.leaves(unstopped),
        strict=True,
    ):
        np.testing.assert_array_equal(first, expected)
        np.testing.assert_array_equal(third, expected)
    # A program of its own, which has never seen other weights.
    cold = jax.jit(_generate.__wrapped__, static_argnames=("graphdef", "sampling", "group"))(
        prepare(four, graphdef=graphdef),
        *map(jnp.asarray, prompts(LENGTHS)),
        keys(range(4)),
        jnp.asarray([-1, -1], jnp.int32),
        jnp.int32(PAD),
        graphdef=graphdef,
        sampling=sampler().sampling,
        group=1,
    )
    np.testing.assert_array_equal(cold.tokens, rollouts[1].tokens)
    np.testing.assert_array_equal(cold.logprob, rollouts[1].logprob)
    assert (np.asarray(cold.logprob) != np.asarray(rollouts[0].logprob)).any()


def _prepared(graphdef, params):
    return prepare(params, graphdef=graphdef).prepared


def test_four_times_the_weight_gives_exactly_four_times_the_product():
    """The derived scale follows the weight: nothing of the old one is kept."""
    key = jax.random.key(0)
    w = jax.random.normal(key, (48, 32), jnp.float32)
    x = jax.random.normal(jax.random.fold_in(key, 1), (5, 32), jnp.bfloat16)
    linear = jax.jit(lambda w, q: jaxfp4.linear(x, w, quantized=q, out_dtype=jnp.float32))
    first, second = (linear(v, jaxfp4.prepare(v, jaxfp4.NVFP4)) for v in (w, 4 * w))
    np.testing.assert_array_equal(second, 4 * first)


def test_weight_hash_sees_every_byte(policy):
    leaves, tree = jax.tree.flatten(policy)
    original = weight_hash(policy)
    for index, leaf in enumerate(leaves):
        bits = np.asarray(leaf).copy()
        view = bits.reshape(-1).view(np.uint8)
        view[len(view) // 2] ^= 1
        changed = [*leaves[:index], jnp.asarray(bits), *leaves[index + 1 :]]
        assert weight_hash(jax.tree.unflatten(tree, changed)) != original
    rolled = [jnp.roll(leaf, 1) for leaf in leaves]
    assert weight_hash(jax.tree.unflatten(tree, rolled)) != original


def test_arguments_are_checked(policy):
    tokens, start = prompts([3, 2])
    with pytest.raises(ValueError, match=r"keys has shape \(3,\)"):
        sampler()(policy, tokens, start, keys(range(3)))
    with pytest.raises(ValueError, match="each must be from 0 to 2"):
        sampler()(policy, tokens, np.array([0, 3]), keys(range(2)))
    with pytest.raises(ValueError, match="prompt 1 has 0 tokens"):
        left_pad([[1], []], 3, PAD)
    with pytest.raises(ValueError, match="prompt 0 has 4 tokens; between 1 and 3"):
        left_pad([[1, 2, 3, 4]], 3, PAD)
