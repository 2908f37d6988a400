"""Qwen3 and Qwen2.5 in plain NumPy fp64, one unpadded sequence, from Hugging Face tensor names.

Written from the published descriptions alone and sharing no code with `models`: no stacking, no
fused matrices, no cache, one expert at a time.
"""

import numpy as np

from models.config import Qwen3Config


def logits(config: Qwen3Config, tensors: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """[T, V] for token ids [T]."""
    tensors = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    x = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_hidden_layers):
        weights = {
            name.removeprefix(f"model.layers.{layer}."): value
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        h = _rmsnorm(x, weights["input_layernorm.weight"], config)
        x = x + _attention(config, weights, h)
        h = _rmsnorm(x, weights["post_attention_layernorm.weight"], config)
        if "mlp.gate.weight" in weights:
            x = x + np.stack([_experts(config, weights, row) for row in h])
        else:
            x = x + _swiglu(weights, "mlp", h)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return _rmsnorm(x, tensors["model.norm.weight"], config) @ tensors[head].T


def _rmsnorm(x, weight, config):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_norm_eps) * weight


def _attention(config, weights, h):
    length, size = len(h), config.head_dim
    heads = {}
    for kind in "qkv":
        y = h @ weights[f"self_attn.{kind}_proj.weight"].T
        if config.qkv_bias:
            y = y + weights[f"self_attn.{kind}_proj.bias"]
        y = y.reshape(length, -1, size)
        if kind != "v":
            if config.qk_norm:
                y = _rmsnorm(y, weights[f"self_attn.{kind}_norm.weight"], config)
            y = _rotate(y, config.rope_theta)
        heads[kind] = y
    outputs = []
    for head in range(config.num_attention_heads):
        shared = head * config.num_key_value_heads // config.num_attention_heads
        scores = heads["q"][:, head] @ heads["k"][:, shared].T / np.sqrt(size)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        outputs.append(_softmax(scores) @ heads["v"][:, shared])
    return np.concatenate(outputs, -1) @ weights["self_attn.o_proj.weight"].T


def _rotate(y, theta):
    """Complex rotation of the pairs (i, i + D/2) by position * theta^(-2i/D)."""
    half = y.shape[-1] // 2
    angle = np.arange(len(y))[:, None, None] * theta ** (-np.arange(half) / half)
    turned = (y[..., :half] + 1j * y[..., half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def _swiglu(weights, prefix, h):
    gate = h @ weights[f"{prefix}.gate_proj.weight"].T
    up = h @ weights[f"{prefix}.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}.down_proj.weight"].T


def _experts(config, weights, h):
    probability = _softmax(weights["mlp.gate.weight"] @ h)
    chosen = np.argsort(-probability, kind="stable")[: config.num_experts_per_tok]
    total = probability[chosen].sum() if config.norm_topk_prob else 1.0
    return sum(probability[e] / total * _swiglu(weights, f"mlp.experts.{e}", h) for e in chosen)


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
