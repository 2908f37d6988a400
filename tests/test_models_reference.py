"""The forward pass in fp32 against a NumPy oracle, for every switch of the config."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen3_oracle
from flax import nnx
from tiny_models import CONFIGS, MIXED, MOE, ODD_HEADS, Batch, build, parameters, sequences

import jaxfp4
from models import Qwen3Config

BATCH = Batch(sequences([9, 12, 1]), left=[3, 0, 5], slots=12)


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, state, tokens, start, end):
    model = nnx.merge(graphdef, state)
    output = model(tokens, start=start, end=end)
    return output.hidden, model.logits(output.hidden)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_oracle(name):
    config = CONFIGS[name]
    model = build(config, jaxfp4.Policy(), dtype=jnp.float32)
    split = nnx.split(model, nnx.Param)
    hidden, logits = forward(*split, BATCH.tokens, BATCH.start, BATCH.end)
    tensors = parameters(model, config)
    for tokens, row in zip(BATCH.sequences, BATCH.real(logits), strict=True):
        expected = qwen3_oracle.logits(config, tensors, tokens)
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    padding = np.ones(hidden.shape[:2], bool)
    for row, (low, tokens) in enumerate(zip(BATCH.left, BATCH.sequences, strict=True)):
        padding[row, low : low + len(tokens)] = False
    assert not np.asarray(hidden)[padding].any()


def test_gradients_of_a_tied_head_are_the_sum_of_both_uses():
    untied = build(ODD_HEADS, jaxfp4.Policy(), dtype=jnp.float32)
    tied = build(CONFIGS["tied"], jaxfp4.Policy(), dtype=jnp.float32)
    # All other parameters are equal by their names.
    untied.lm_head.set_value(untied.embed_tokens[...])

    def gradients(model):
        graphdef, state = nnx.split(model, nnx.Param)

        @jax.jit
        def gradient(state):
            def loss(state):
                model = nnx.merge(graphdef, state)
                hidden = model(BATCH.tokens, start=BATCH.start, end=BATCH.end).hidden
                logprob, _ = model.token_logprob(hidden, jnp.maximum(BATCH.tokens, 0))
                return jnp.sum(jnp.where(BATCH.tokens >= 0, logprob, 0.0))

            return jax.grad(loss)(state)

        return parameters(gradient(state), model.config)

    apart, together = gradients(untied), gradients(tied)
    embedding, head = apart["model.embed_tokens.weight"], apart.pop("lm_head.weight")
    assert np.abs(embedding).max() > 0.1
    assert np.abs(head).max() > 0.1
    np.testing.assert_allclose(
        together.pop("model.embed_tokens.weight"), embedding + head, rtol=1e-4, atol=1e-4
    )
    for name, gradient in together.items():
        np.testing.assert_allclose(gradient, apart[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_token_outside_the_vocabulary_is_not_read_as_another():
    model = build(ODD_HEADS, jaxfp4.Policy(), dtype=jnp.float32)
    tokens = BATCH.tokens.at[0, 5].set(ODD_HEADS.vocab_size)
    split = nnx.split(model, nnx.Param)
    hidden, _ = map(np.asarray, forward(*split, tokens, BATCH.start, BATCH.end))
    assert np.isnan(hidden[0, 5]).all()
    assert np.isfinite(hidden[0, :5]).all()
    assert np.isfinite(hidden[1:]).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("num_experts_per_tok", 7),
        ("mlp_only_layers", (3,)),
        ("vocab_size", 0),
        ("moe_intermediate_size", 0),
    ],
)
def test_a_config_without_meaning_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(MOE, **{field: value})


def test_config_kinds_of_layers():
    config = dataclasses.replace(MIXED, num_hidden_layers=6, mlp_only_layers=(3,))
    assert config.moe_layers == (1, 5)
    assert config.dense_layers == (0, 2, 3, 4)
    assert Qwen3Config.from_hf(config.to_hf()) == config
