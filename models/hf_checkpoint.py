"""Qwen3 checkpoints in Hugging Face's layout: `config.json` and safetensors files.

`tensor_map` says which part of which stacked parameter each tensor is; loading and saving both
follow it, so that every parameter is written exactly once or the load stops with the names.
Experts come one by one (`experts.3.gate_proj.weight`) or fused (`experts.gate_up_proj`
[E, 2I, H], gate first); the config is the same for both, so the tensors' names decide.

Left out: tokenizer files and generation settings, which are not the model's.
"""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, for safetensors to find)
import numpy as np
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

import jaxfp4
from models.config import Qwen3Config
from models.qwen3 import Qwen3

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F32", "F16", "BF16")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Experts = Literal["single", "fused"]
PathParts = tuple[Any, ...]  # of a parameter in the model's state, as nnx gives it


@dataclass(frozen=True)
class Part:
    """Where one tensor of a checkpoint lies in the model: parameter[index]."""

    name: str
    parameter: PathParts
    index: tuple[int | slice, ...]


class CheckpointError(ValueError):
    """The tensors in the files are not those of the model; the message lists their names."""


def tensor_map(config: Qwen3Config, experts: Experts = "single") -> list[Part]:
    """Every tensor of a checkpoint, with its place in the model's stacked parameters."""
    parts = [
        Part(_EMBEDDING, ("embed_tokens",), ()),
        Part("model.norm.weight", ("norm",), ()),
    ]
    if not config.tie_word_embeddings:
        parts.append(Part(_HEAD, ("lm_head",), ()))
    for layer in range(config.num_hidden_layers):
        parts += _attention_parts(config, layer)
    for place, layer in enumerate(config.dense_layers):
        inner, prefix = config.intermediate_size, f"model.layers.{layer}"
        at = ("dense_mlp", "gate_up_proj")
        parts += [
            Part(f"{prefix}.post_attention_layernorm.weight", ("dense_mlp", "post_norm"), (place,)),
            Part(f"{prefix}.mlp.gate_proj.weight", at, (place, slice(0, inner))),
            Part(f"{prefix}.mlp.up_proj.weight", at, (place, slice(inner, 2 * inner))),
            Part(f"{prefix}.mlp.down_proj.weight", ("dense_mlp", "down_proj"), (place,)),
        ]
    for place, layer in enumerate(config.moe_layers):
        parts += _moe_parts(config, place, layer, experts)
    return parts


def named_tensors(
    model: Qwen3 | nnx.State, config: Qwen3Config, experts: Experts = "single"
) -> Iterator[tuple[str, jax.Array]]:
    """The parameters of a model (or any tree of its shape, such as gradients) by their Hugging
    Face names, one at a time."""
    parameters = _parameters(model)
    for part in tensor_map(config, experts):
        yield part.name, parameters[part.parameter][part.index]


def load_hf(
    path: str | Path,
    policy: jaxfp4.Policy,
    *,
    dtype: Any = jnp.bfloat16,
    param_dtype: Any = jnp.float32,
    remat: Literal["none", "block"] = "none",
) -> Qwen3:
    """Loads a folder with `config.json` and `model.safetensors`, or shards with their index.

    The other arguments are those of `Qwen3`. Each parameter is put together in host memory on its
    own, so the peak above the model itself is its largest parameter.

    Raises FileNotFoundError for a file that is not there, ValueError for a config that the model
    does not compute, CheckpointError with the names of all missing, extra and misshapen tensors.
    """
    path = Path(path)
    config = Qwen3Config.from_hf(json.loads((path / "config.json").read_text()))

    def build() -> Qwen3:
        return Qwen3(
            config,
            policy,
            dtype=dtype,
            param_dtype=param_dtype,
            remat=remat,
            rngs=nnx.Rngs(0),
        )

    model = nnx.eval_shape(build)
    parameters = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    with ExitStack() as stack:
        tensors = _open_tensors(path, stack)
        fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in tensors)
        parts = tensor_map(config, "fused" if fused else "single")
        _check_tensors(config, parts, tensors, parameters)
        by_parameter = defaultdict(list)
        for part in parts:
            by_parameter[part.parameter].append(part)
        for name, variable in parameters.items():
            value = np.empty(variable.shape, variable.dtype)
            for part in by_parameter[name]:
                value[part.index] = tensors[part.name].get_tensor(part.name)
            variable.set_value(jnp.asarray(value))
    return model


def save_hf(
    model: Qwen3,
    path: str | Path,
    *,
    dtype: Any = jnp.bfloat16,
    experts: Experts = "single",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes `config.json` and the parameters in `dtype`, in shards of at most `max_shard_bytes`.

    A shard appears under its name when it is complete, the config last.

    Raises FileExistsError where the folder holds safetensors already, ValueError for a model
    that no Hugging Face config describes.
    """
    path, config, dtype = Path(path), model.config, jnp.dtype(dtype)
    hf_config = config.to_hf() | {"dtype": dtype.name, "torch_dtype": dtype.name}
    path.mkdir(parents=True, exist_ok=True)
    present = sorted(file.name for file in path.glob("*.safetensors"))
    if present:
        raise FileExistsError(f"{path} holds {present} already; save to another folder")
    parameters = _parameters(model)
    shards: list[list[Part]] = [[]]
    sizes = [0]
    for part in tensor_map(config, experts):
        shape = _shape(parameters[part.parameter].shape, part.index)
        size = int(np.prod(shape)) * dtype.itemsize
        if shards[-1] and sizes[-1] + size > max_shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(part)
        sizes[-1] += size
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [_SINGLE]
    for file, shard in zip(files, shards, strict=True):
        tensors = {
            part.name: np.ascontiguousarray(
                np.asarray(parameters[part.parameter][part.index]).astype(dtype)
            )
            for part in shard
        }
        save_file(tensors, path / f"{file}.partial", metadata={"format": "pt"})
        os.replace(path / f"{file}.partial", path / file)
    if len(shards) > 1:
        weight_map = {
            part.name: file for file, shard in zip(files, shards, strict=True) for part in shard
        }
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (path / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (path / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")


def _attention_parts(config: Qwen3Config, layer: int) -> list[Part]:
    prefix = f"model.layers.{layer}"
    query = config.num_attention_heads * config.head_dim
    key = config.num_key_value_heads * config.head_dim
    bounds = {"q": (0, query), "k": (query, query + key), "v": (query + key, query + 2 * key)}
    parts = [
        Part(f"{prefix}.input_layernorm.weight", ("attention", "input_norm"), (layer,)),
        Part(f"{prefix}.self_attn.o_proj.weight", ("attention", "o_proj"), (layer,)),
    ]
    for head, (low, high) in bounds.items():
        name, rows = f"{prefix}.self_attn.{head}_proj", (layer, slice(low, high))
        parts.append(Part(f"{name}.weight", ("attention", "qkv_proj"), rows))
        if config.qkv_bias:
            parts.append(Part(f"{name}.bias", ("attention", "qkv_bias"), rows))
    if config.qk_norm:
        for norm in ("q_norm", "k_norm"):
            parts.append(Part(f"{prefix}.self_attn.{norm}.weight", ("attention", norm), (layer,)))
    return parts


def _moe_parts(config: Qwen3Config, place: int, layer: int, experts: Experts) -> list[Part]:
    prefix, inner = f"model.layers.{layer}", config.moe_intermediate_size
    gate_up, down = ("moe", "gate_up_proj"), ("moe", "down_proj")
    parts = [
        Part(f"{prefix}.post_attention_layernorm.weight", ("moe", "post_norm"), (place,)),
        Part(f"{prefix}.mlp.gate.weight", ("moe", "router"), (place,)),
    ]
    if experts == "fused":
        return [
            *parts,
            Part(f"{prefix}.mlp.experts.gate_up_proj", gate_up, (place,)),
            Part(f"{prefix}.mlp.experts.down_proj", down, (place,)),
        ]
    for expert in range(config.num_experts):
        name = f"{prefix}.mlp.experts.{expert}"
        parts += [
            Part(f"{name}.gate_proj.weight", gate_up, (place, expert, slice(0, inner))),
            Part(f"{name}.up_proj.weight", gate_up, (place, expert, slice(inner, 2 * inner))),
            Part(f"{name}.down_proj.weight", down, (place, expert)),
        ]
    return parts


def _parameters(model: Qwen3 | nnx.State) -> dict[PathParts, jax.Array]:
    state = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    return {path: variable[...] for path, variable in nnx.to_flat_state(state)}


def _shape(shape: tuple[int, ...], index: tuple[int | slice, ...]) -> tuple[int, ...]:
    """The shape of an array of `shape` after indexing."""
    return np.broadcast_to(np.int8(0), shape)[index].shape


def _open_tensors(path: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor in a folder, by the tensor's name."""
    indexed: dict[str, str] = {}
    files = [_SINGLE]
    if (path / _INDEX).exists():
        if (path / _SINGLE).exists():
            raise CheckpointError(f"{path} has both {_SINGLE} and {_INDEX}: remove one")
        indexed = json.loads((path / _INDEX).read_text())["weight_map"]
        files = sorted(set(indexed.values()))
    absent = [file for file in files if not (path / file).is_file()]
    if absent:
        raise FileNotFoundError(f"{path} has no {', '.join(absent)}")
    tensors: dict[str, Any] = {}
    count: Counter[str] = Counter()
    for file in files:
        opened = stack.enter_context(safe_open(path / file, framework="np"))
        for name in opened.keys():  # noqa: SIM118  (a file handle, not a mapping)
            count[name] += 1
            tensors[name] = opened
    repeated = sorted(name for name, times in count.items() if times > 1)
    if repeated:
        raise CheckpointError(f"{path}: tensors in more than one file: {', '.join(repeated)}")
    if indexed and set(indexed) != set(tensors):
        raise CheckpointError(
            f"{path}: {_INDEX} and its files disagree about the tensors "
            f"{', '.join(sorted(set(indexed) ^ set(tensors)))}"
        )
    return tensors


def _check_tensors(
    config: Qwen3Config,
    parts: list[Part],
    tensors: dict[str, Any],
    parameters: Mapping[PathParts, Any],
) -> None:
    """Raises CheckpointError unless the tensors fill every parameter exactly once."""
    expected = {part.name: part for part in parts}
    missing = sorted(set(expected) - set(tensors))
    extra = set(tensors) - set(expected)
    if config.tie_word_embeddings and _HEAD in extra and _EMBEDDING in tensors:
        # Some tied checkpoints carry the head a second time. Another head is not tied.
        head = tensors[_HEAD].get_tensor(_HEAD)
        embedding = tensors[_EMBEDDING].get_tensor(_EMBEDDING)
        if not np.array_equal(head, embedding):
            raise CheckpointError(
                f"tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}"
            )
        extra.remove(_HEAD)
    misshapen = []
    for name in sorted(set(expected) & set(tensors)):
        found = tensors[name].get_slice(name)
        part = expected[name]
        shape = _shape(parameters[part.parameter].shape, part.index)
        if tuple(found.get_shape()) != shape or found.get_dtype() not in _FLOATS:
            misshapen.append(
                f"{name} is {found.get_dtype()}{found.get_shape()}, expected {list(shape)}"
            )
    problems = [
        f"{kind} ({len(names)}): {', '.join(names)}"
        for kind, names in (
            ("missing", missing),
            ("extra", sorted(extra)),
            ("misshapen", misshapen),
        )
        if names
    ]
    if problems:
        raise CheckpointError("the tensors are not those of the config; " + "; ".join(problems))
