"""The shape of a Qwen3 policy, and its translation from and to a Hugging Face `config.json`.

One config describes three published families, which differ in four switches:

| model_type | qk_norm | qkv_bias | experts | head_dim |
| --- | --- | --- | --- | --- |
| qwen3 | yes | no | no | its own key |
| qwen3_moe | yes | no | yes | its own key |
| qwen2 (Qwen2.5) | no | yes | no | hidden_size / num_attention_heads |

Both key styles are read and written: transformers 4 (`rope_theta`, `num_experts`,
`torch_dtype`) and transformers 5 (`rope_parameters`, `num_local_experts`, `dtype`). A value that
appears under both names must be the same.

Left out, and refused by name: scaled or partial RoPE, sliding-window attention, activations
other than SiLU, biases outside q, k and v, dropout, quantised checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FAMILIES = ("qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Sizes and switches of a Qwen3 (or Qwen2.5) decoder.

    `num_experts=0` is a dense model. Otherwise layer i is a mixture of experts where i is not in
    `mlp_only_layers` and i + 1 is a multiple of `decoder_sparse_step`; the other layers have a
    dense MLP of `intermediate_size`.

    Raises ValueError, naming the field and its value, for a combination that has no meaning.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    qk_norm: bool = True
    qkv_bias: bool = False
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        positive = [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rope_theta",
            "rms_norm_eps",
            "decoder_sparse_step",
            "max_position_embeddings",
        ]
        if self.num_experts:
            positive += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds "
                f"num_experts={self.num_experts}"
            )
        outside = [i for i in self.mlp_only_layers if not 0 <= i < self.num_hidden_layers]
        if outside:
            raise ValueError(
                f"mlp_only_layers={list(self.mlp_only_layers)} names layers {outside}, legal are "
                f"0 to {self.num_hidden_layers - 1}"
            )

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` is a mixture of experts."""
        return (
            self.num_experts > 0
            and layer not in self.mlp_only_layers
            and (layer + 1) % self.decoder_sparse_step == 0
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the mixture-of-experts layers, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_moe(i))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a dense MLP, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_moe(i))

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "Qwen3Config":
        """Reads the contents of a Hugging Face `config.json`.

        Raises ValueError, naming the key and its value, for what this model does not compute.
        """
        _refuse_unsupported(hf)
        family = hf["model_type"]
        moe = family == "qwen3_moe"
        eos = hf.get("eos_token_id")
        heads = _required(hf, "num_attention_heads")
        return cls(
            vocab_size=_required(hf, "vocab_size"),
            hidden_size=_required(hf, "hidden_size"),
            intermediate_size=_required(hf, "intermediate_size"),
            num_hidden_layers=_required(hf, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=_required(hf, "num_key_value_heads"),
            head_dim=_head_dim(hf),
            rope_theta=float(_same(hf, ("rope_theta",), ("rope_parameters", "rope_theta"))),
            rms_norm_eps=_required(hf, "rms_norm_eps"),
            qk_norm=family != "qwen2",
            qkv_bias=family == "qwen2",
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
            num_experts=_same(hf, ("num_experts",), ("num_local_experts",)) if moe else 0,
            num_experts_per_tok=_required(hf, "num_experts_per_tok") if moe else 0,
            moe_intermediate_size=_required(hf, "moe_intermediate_size") if moe else 0,
            norm_topk_prob=_required(hf, "norm_topk_prob") if moe else True,
            mlp_only_layers=tuple(hf.get("mlp_only_layers") or ()) if moe else (),
            decoder_sparse_step=hf.get("decoder_sparse_step", 1) if moe else 1,
            initializer_range=hf.get("initializer_range", 0.02),
            max_position_embeddings=hf.get("max_position_embeddings", 32768),
            bos_token_id=hf.get("bos_token_id"),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            pad_token_id=hf.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that transformers 4 and 5 both read as this model.

        Raises ValueError where no published family has this combination of switches.
        """
        switches = (self.qk_norm, self.qkv_bias, self.num_experts > 0)
        families = {
            (True, False, False): ("qwen3", "Qwen3ForCausalLM"),
            (True, False, True): ("qwen3_moe", "Qwen3MoeForCausalLM"),
            (False, True, False): ("qwen2", "Qwen2ForCausalLM"),
        }
        if switches not in families:
            raise ValueError(
                f"no Hugging Face model has qk_norm={self.qk_norm}, qkv_bias={self.qkv_bias} and "
                f"num_experts={self.num_experts}; qwen3 is True, False, 0, qwen3_moe True, False, "
                "more than 0, qwen2 False, True, 0"
            )
        family, architecture = families[switches]
        hf: dict[str, Any] = {
            "architectures": [architecture],
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": (
                list(self.eos_token_id)
                if isinstance(self.eos_token_id, tuple)
                else self.eos_token_id
            ),
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": family,
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": self.pad_token_id,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }
        if family == "qwen2":
            _head_dim({**hf, "head_dim": self.head_dim})
        else:
            hf |= {"attention_bias": False, "head_dim": self.head_dim}
        if family == "qwen3_moe":
            hf |= {
                "decoder_sparse_step": self.decoder_sparse_step,
                "mlp_only_layers": list(self.mlp_only_layers),
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.num_experts_per_tok,
                "num_local_experts": self.num_experts,
            }
        return hf


def _required(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ValueError(f"the model config has no {key}")
    return hf[key]


def _same(hf: Mapping[str, Any], *paths: tuple[str, ...]) -> Any:
    """The one value found under any of several key paths.

    Transformers fills a missing rope_theta with 10,000 in silence; here it is an error.
    """
    found = {}
    for path in paths:
        value: Any = hf
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found[".".join(path)] = value
    if not found:
        raise ValueError(f"the model config has none of {['.'.join(path) for path in paths]}")
    if len(set(found.values())) > 1:
        raise ValueError(f"the model config contradicts itself: {found}")
    return next(iter(found.values()))


def _head_dim(hf: Mapping[str, Any]) -> int:
    """The size of a head: a key of its own, but for qwen2, which always derives it."""
    if hf["model_type"] != "qwen2":
        return _required(hf, "head_dim")
    hidden, heads = _required(hf, "hidden_size"), _required(hf, "num_attention_heads")
    if hidden % heads or (hf.get("head_dim") or hidden // heads) != hidden // heads:
        raise ValueError(
            f"head_dim={hf.get('head_dim')}: qwen2 takes hidden_size / num_attention_heads = "
            f"{hidden} / {heads}"
        )
    return hidden // heads


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    def refuse(key: str, legal: str) -> None:
        raise ValueError(f"model config {key}={hf.get(key)!r} is not supported: {legal}")

    if hf.get("model_type") not in _FAMILIES:
        refuse("model_type", f"legal are {', '.join(_FAMILIES)}")
    if hf.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "the only activation is 'silu'")
    for key in ("rope_scaling", "rope_parameters"):
        rope = hf.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            refuse(key, "positions are rotated in full and unscaled, rope_type 'default'")
    if hf.get("use_sliding_window") and hf.get("sliding_window") is not None:
        refuse("use_sliding_window", "every layer attends to all earlier tokens")
    if any(kind != "full_attention" for kind in hf.get("layer_types") or ()):
        refuse("layer_types", "every layer is 'full_attention'")
    if hf["model_type"] != "qwen2" and hf.get("attention_bias"):
        refuse("attention_bias", "it would put a bias on o_proj too; only false is legal")
    if hf.get("attention_dropout"):
        refuse("attention_dropout", "there is no dropout; set it to 0.0")
    if hf.get("quantization_config") is not None:
        refuse("quantization_config", "load a BF16, FP16 or FP32 checkpoint")
