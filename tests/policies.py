"""Small policies, prompts and rollouts for the tests of sampler, learner and checkpoints."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny_models import build

from jaxfp4 import policy
from models import Qwen3Config
from train.config import Optimizer, Sampling
from train.grpo import LossConfig
from train.learner import Learner
from train.rollout import Rollout, left_pad
from train.sampler import Sampler, request_keys
from train.weights import Weights, prepare

VOCABULARY = 29
PAD = 0
DENSE = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    initializer_range=0.3,
)
MOE = dataclasses.replace(DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
KINDS = {"dense": DENSE, "moe": MOE}
RECIPES = {"nvfp4": policy.all_linears(), "bf16": policy.none()}


def split(kind: str, recipe: str, remat: str = "none") -> tuple[nnx.GraphDef, nnx.State]:
    """A model, as its structure and its parameters; the same ones at each call."""
    return nnx.split(build(KINDS[kind], RECIPES[recipe], remat=remat), nnx.Param)


def weights(kind: str = "moe", recipe: str = "nvfp4") -> Weights:
    graphdef, params = split(kind, recipe)
    return prepare(params, graphdef=graphdef)


def sampler(
    kind: str = "moe",
    recipe: str = "nvfp4",
    *,
    stop_ids: tuple[int, ...] = (-1, -1),
    **sampling,
) -> Sampler:
    """The default stop ids are never drawn."""
    settings = Sampling(**({"max_new_tokens": 6} | sampling))
    return Sampler(split(kind, recipe)[0], settings, stop_ids, PAD)


def learner(
    kind: str = "moe",
    recipe: str = "nvfp4",
    *,
    remat: str = "none",
    loss: LossConfig | None = None,
    learning_rate: float = 1e-2,
    temperature: float = 1.0,
    max_new_tokens: int = 6,
    micro_batch: int = 8,
) -> Learner:
    return Learner(
        graphdef=split(kind, recipe, remat)[0],
        optimizer=Optimizer(learning_rate=learning_rate),
        loss=loss or LossConfig(),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        micro_batch=micro_batch,
    )


def prompts(lengths: list[int], slots: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of these lengths, padded on the left; prompt i depends on i and its length alone."""
    ids = [
        np.random.default_rng((i, n)).integers(1, VOCABULARY, n).tolist()
        for i, n in enumerate(lengths)
    ]
    return left_pad(ids, slots or max(lengths), PAD)


def keys(requests: np.ndarray | list[int], step: int = 0) -> jax.Array:
    return request_keys(jax.random.key(7), step, np.asarray(requests))


def made_up_rollout(completions: list[int], prompt: int = 5, limit: int | None = None) -> Rollout:
    """Random tokens with completions of these lengths; log-probs are 0."""
    limit = limit or max(completions)
    rng = np.random.default_rng(3)
    rows, slots = len(completions), prompt + limit
    end = prompt + np.asarray(completions)
    slot = np.arange(slots)
    return Rollout(
        tokens=jnp.asarray(rng.integers(1, VOCABULARY, (rows, slots)), jnp.int32),
        start=jnp.asarray(rng.integers(0, prompt, rows), jnp.int32),
        end=jnp.asarray(end, jnp.int32),
        logprob=jnp.zeros((rows, slots), jnp.float32),
        mask=jnp.asarray((slot >= prompt) & (slot < end[:, None])),
        finished=jnp.ones(rows, bool),
        rewards=jnp.zeros(rows, jnp.float32),
    )
