"""The policy of a run: from a checkpoint or from random weights, quantised as the run says."""

import json

import jax
from flax import nnx

from jaxfp4 import policy
from models import Qwen3, Qwen3Config, load_hf
from train.config import Model


def build_model(config: Model, key: jax.Array) -> Qwen3:
    """The policy, from a checkpoint or from random weights drawn with `key`."""
    if config.checkpoint is not None:
        hf = json.loads((config.checkpoint / "config.json").read_text(encoding="utf-8"))
        chosen = quantization_policy(config, Qwen3Config.from_hf(hf))
        return load_hf(config.checkpoint, policy=chosen, remat=config.remat)
    assert config.architecture is not None  # Run.check_inputs
    chosen = quantization_policy(config, config.architecture)
    return Qwen3(config.architecture, chosen, remat=config.remat, rngs=nnx.Rngs(params=key))


def quantization_policy(config: Model, architecture: Qwen3Config) -> policy.Policy:
    """Which layers multiply in NVFP4, as `config.quantization` says."""
    match config.quantization:
        case "all-linears":
            return policy.all_linears()
        case "experts-only":
            return policy.experts_only()
        case "last-15-percent-bf16":
            return policy.last_layers_unquantized(architecture.num_hidden_layers)
        case "none":
            return policy.none()
