"""A run as data: small frozen dataclasses, checked when they are made.

`Run` holds everything that decides what a run computes; it is written into the run's folder and
read back by `resume`. What is wrong with one value is said by its own class, what does not fit
together by `Run`; messages start with the option's name.
"""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from models import Qwen3Config
from train.grpo import LossConfig
from train.options import check, check_choice
from train.tasks import Arithmetic

DataKind = Literal[
    "arithmetic", "reasoning-gym", "gsm8k", "svamp", "dapo", "math", "olympiadbench", "ifeval"
]
Quantization = Literal["all-linears", "experts-only", "last-15-percent-bf16", "none"]
Remat = Literal["none", "block"]
OldLogprob = Literal["sampler", "recompute"]


def _check_drawing(part: str, temperature: float, top_k: int | None, top_p: float) -> None:
    legal = 0.0 <= temperature < math.inf
    check(f"{part}.temperature", temperature, legal, "0 or more, and finite")
    check(f"{part}.top-k", top_k, top_k is None or top_k >= 1, "at least 1, or None")
    check(f"{part}.top-p", top_p, 0.0 < top_p <= 1.0, "above 0 and at most 1")


@dataclass(frozen=True)
class Model:
    """The policy."""

    checkpoint: Path | None = None
    """Folder of a Hugging Face checkpoint (config.json and safetensors) to start from."""
    architecture: Qwen3Config | None = None
    """Sizes of a model that starts from random weights, instead of a checkpoint."""
    quantization: Quantization = "all-linears"
    """Which linear layers multiply in NVFP4: all of them, those of the experts, all but those of
    the last 15 % of the layers, or none. Embedding, router and head are never quantised."""
    remat: Remat = "none"
    """What the backward pass computes again instead of keeping it: nothing, or each block."""

    def __post_init__(self) -> None:
        check_choice("model.quantization", self.quantization, Quantization)
        check_choice("model.remat", self.remat, Remat)
        if self.checkpoint is not None and self.architecture is not None:
            raise ValueError("model.checkpoint and model.architecture: give one of them, not both")


@dataclass(frozen=True)
class Data:
    """Prompts and what grades the answers."""

    kind: DataKind
    """Kind of the data: made-up sums, a task of reasoning-gym, or a JSONL file of one of these
    data sets."""
    path: Path | None = None
    """The JSONL file that training takes its prompts from."""
    task: str | None = None
    """Name of the task of kind reasoning-gym, such as chain_sum."""
    task_problems: int = 2000
    """Problems of it that are made for training."""
    heldout: Path | None = None
    """A JSONL file of the same kind to measure accuracy on; without it there is no evaluation."""
    tokenizer: Path | None = None
    """Folder of tokenizer.json and its chat template (not for arithmetic); default: the
    checkpoint's."""
    reward: str | None = None
    """A built-in reward or your own function as package.module:function; default: the kind's."""
    prompt_slots: int = 1024
    """Longest prompt in tokens; longer ones are left out, and counted."""
    arithmetic: Arithmetic | None = None
    """The problems of kind arithmetic."""

    def __post_init__(self) -> None:
        check_choice("data.kind", self.kind, DataKind)
        check("data.prompt-slots", self.prompt_slots, self.prompt_slots >= 1, "at least 1")
        check("data.task-problems", self.task_problems, self.task_problems >= 1, "at least 1")
        if self.task is not None and self.kind != "reasoning-gym":
            raise ValueError(f"data.task={self.task}: only data.kind=reasoning-gym has tasks")
        if (self.kind == "arithmetic") != (self.arithmetic is not None):
            raise ValueError(
                f"data.kind={self.kind}: data.arithmetic is given with kind arithmetic and no other"
            )
        # An option without effect would be a surprise at the end of a run.
        made = self.kind in ("arithmetic", "reasoning-gym")
        for name, value, unused in (
            ("path", self.path, made),
            ("heldout", self.heldout, made),
            ("tokenizer", self.tokenizer, self.kind == "arithmetic"),
        ):
            if value is not None and unused:
                raise ValueError(f"data.{name}={value}: data.kind={self.kind} has no use for it")


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    max_new_tokens: int
    """Longest completion in tokens, the stop token included."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token (evaluation only)."""
    top_k: int | None = None
    """Draw from the k most likely tokens (evaluation only)."""
    top_p: float = 1.0
    """Draw from the fewest tokens that have this probability together (evaluation only)."""
    micro_batch: int | None = None
    """Completions that are drawn at a time, each with its cache of keys and values; None: all of
    a rollout. Changes memory and speed, not the result."""

    def __post_init__(self) -> None:
        limit = self.max_new_tokens
        check("sampling.max-new-tokens", limit, limit >= 1, "at least 1")
        size = self.micro_batch
        check("sampling.micro-batch", size, size is None or size >= 1, "at least 1, or None")
        _check_drawing("sampling", self.temperature, self.top_k, self.top_p)

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_k is not None or self.top_p < 1.0


@dataclass(frozen=True)
class Optimizer:
    """AdamW with clipping by global norm and a linear warm-up."""

    learning_rate: float = 1e-6
    """Step size after the warm-up."""
    warmup_steps: int = 0
    """Steps over which it rises linearly to that."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decay of the matrices (not of norms and biases), times the step size."""
    clip_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it."""

    def __post_init__(self) -> None:
        def positive(name: str, value: float) -> None:
            check(f"optimizer.{name}", value, 0.0 < value < math.inf, "above 0, and finite")

        positive("learning-rate", self.learning_rate)
        positive("epsilon", self.epsilon)
        positive("clip-norm", self.clip_norm)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            check(f"optimizer.{name}", beta, 0.0 <= beta < 1.0, "from 0 to below 1")
        warmup, decay = self.warmup_steps, self.weight_decay
        check("optimizer.warmup-steps", warmup, warmup >= 0, "0 or more")
        check("optimizer.weight-decay", decay, 0.0 <= decay < math.inf, "0 or more, and finite")


@dataclass(frozen=True)
class Grpo:
    """The reinforcement learning loop."""

    steps: int
    """Rollouts to learn from."""
    prompts: int
    """Prompts of a rollout."""
    group_size: int
    """Completions of each prompt; their rewards are compared with each other."""
    epochs: int = 1
    """Optimiser steps on each rollout."""
    micro_batch: int = 16
    """Completions in one forward and backward pass; changes memory and speed, not the result."""
    old_logprob: OldLogprob = "sampler"
    """Where the importance ratio's old log-probs come from. Both are the same where the gap
    between sampler and learner is 0."""
    resample: int = 0
    """Dynamic sampling: at most this many further rollouts in a step, to replace the groups whose
    rewards are all equal; those that are left take no part in the loss. 0: every group counts."""
    overlong_buffer: int = 0
    """Length penalty: the reward falls by up to 1 over the last so many tokens; 0: none."""
    shuffle_rewards: bool = False
    """Permute the rewards of each rollout: a control run, which must not learn."""

    def __post_init__(self) -> None:
        for name in ("steps", "prompts", "epochs", "micro_batch"):
            value = getattr(self, name)
            check(f"grpo.{name.replace('_', '-')}", value, value >= 1, "at least 1")
        size = self.group_size
        check("grpo.group-size", size, size >= 2, "at least 2: a lone completion has no advantage")
        check_choice("grpo.old-logprob", self.old_logprob, OldLogprob)
        check("grpo.resample", self.resample, self.resample >= 0, "0 or more")
        buffer = self.overlong_buffer
        check("grpo.overlong-buffer", buffer, buffer >= 0, "0 or more")


@dataclass(frozen=True)
class Supervised:
    """A supervised phase before the reinforcement learning, to teach the format of an answer."""

    accuracy: float = 0.5
    """Stop as soon as sampled answers to held-out problems are right this often."""
    max_steps: int = 1000
    """Stop after so many optimiser steps in any case."""
    batch: int = 64
    """Problems in a step."""
    check_every: int = 20
    """Steps between two measurements."""
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=3e-3))

    def __post_init__(self) -> None:
        rule = "above 0 and at most 0.6: reinforcement learning needs something left to learn"
        check("supervised.accuracy", self.accuracy, 0.0 < self.accuracy <= 0.6, rule)
        for name in ("max_steps", "batch", "check_every"):
            value = getattr(self, name)
            check(f"supervised.{name.replace('_', '-')}", value, value >= 1, "at least 1")


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on held-out problems, before and after."""

    prompts: int = 256
    """Held-out problems that are asked, at most."""
    every: int = 0
    """Also measure after every so many steps; 0: only before and after."""
    temperature: float = 0.0
    """As in sampling; 0 takes the most likely token."""
    top_k: int | None = None
    """As in sampling."""
    top_p: float = 1.0
    """As in sampling."""

    def __post_init__(self) -> None:
        check("evaluation.prompts", self.prompts, self.prompts >= 1, "at least 1")
        check("evaluation.every", self.every, self.every >= 0, "0 or more")
        _check_drawing("evaluation", self.temperature, self.top_k, self.top_p)

    def sampling(self, training: Sampling) -> Sampling:
        """How held-out answers are drawn: as in training, but for these settings."""
        return dataclasses.replace(
            training, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p
        )


@dataclass(frozen=True)
class Checkpoints:
    """What is kept on disk to resume from."""

    every: int = 10
    """Steps between two checkpoints; the last step always has one."""
    keep: int = 2
    """Checkpoints that are kept; older ones are deleted."""

    def __post_init__(self) -> None:
        check("checkpoints.every", self.every, self.every >= 1, "at least 1")
        check("checkpoints.keep", self.keep, self.keep >= 1, "at least 1")


@dataclass(frozen=True)
class Run:
    """One training run."""

    name: str
    """What the run is called in its folder's name and its report."""
    model: Model
    data: Data
    sampling: Sampling
    grpo: Grpo
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: Optimizer = field(default_factory=Optimizer)
    supervised: Supervised | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    seed: int = 0
    """Decides the random weights, the order of the prompts and every draw."""
    folder: Path | None = None
    """The run's folder, which must not hold another run; default: runs/ and name and time."""

    def __post_init__(self) -> None:
        check("seed", self.seed, 0 <= self.seed < 2**31, "from 0 to 2147483647")
        sampling = self.sampling
        if sampling.truncates:
            raise ValueError(
                f"sampling.top-k={sampling.top_k}, sampling.top-p={sampling.top_p}: training draws "
                "from the whole vocabulary (None and 1.0), because the log-probs of a truncated "
                "distribution are not those that the learner computes; evaluation may truncate"
            )
        if sampling.temperature == 0.0:
            raise ValueError(
                "sampling.temperature=0.0: training needs a temperature above 0, or all "
                "completions of a prompt are equal; evaluation may use 0"
            )
        size, group = sampling.micro_batch, self.grpo.group_size
        rule = f"None or at least grpo.group-size={group}: a group shares its prefill"
        check("sampling.micro-batch", size, size is None or size >= group, rule)
        buffer, limit = self.grpo.overlong_buffer, sampling.max_new_tokens
        check("grpo.overlong-buffer", buffer, buffer <= limit, f"at most {limit}, the length limit")
        cap = self.loss.sampler_ratio_cap
        if cap is not None and self.grpo.old_logprob == "sampler":
            raise ValueError(
                f"loss.sampler-ratio-cap={cap} with grpo.old-logprob='sampler': must be "
                "'recompute', since the sampler's log-probs weigh nothing against themselves"
            )
        if self.supervised is not None and self.data.kind != "arithmetic":
            raise ValueError("supervised: only arithmetic has worked answers to learn from")

    def check_inputs(self) -> None:
        """Checks what a recipe leaves open and the user has to give: paths that exist.

        Raises ValueError, naming the option.
        """
        model, data = self.model, self.data
        if model.checkpoint is None and model.architecture is None:
            raise ValueError(
                "model.checkpoint is not given: the folder of a Hugging Face checkpoint "
                "(config.json and *.safetensors)"
            )
        if data.kind != "arithmetic":
            if data.kind == "reasoning-gym":
                if data.task is None:
                    raise ValueError("data.task is not given: the name of a reasoning-gym task")
            elif data.path is None:
                raise ValueError(f"data.path is not given: a JSONL file of kind {data.kind}")
            if data.tokenizer is None and model.checkpoint is None:
                raise ValueError(
                    "data.tokenizer is not given: the folder of tokenizer.json and its chat "
                    "template"
                )
        for name, path in (
            ("model.checkpoint", model.checkpoint),
            ("data.path", data.path),
            ("data.heldout", data.heldout),
            ("data.tokenizer", data.tokenizer),
        ):
            if path is not None and not path.exists():
                raise ValueError(f"{name}={path}: there is no such file or folder")


def to_json(config: Any) -> Any:
    """A dataclass as dicts, lists and plain values, for a JSON file."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, tuple):
        return [to_json(item) for item in config]
    return str(config) if isinstance(config, Path) else config


def from_json(kind: Any, value: Any, name: str = "run") -> Any:
    """The inverse of `to_json` for a value of type `kind`.

    Raises:
      ValueError: a field is missing or unknown, or its value is not legal; `name` says where.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        kinds = [a for a in arguments if a is not types.NoneType]
        tuples = [a for a in kinds if typing.get_origin(a) is tuple]
        kind = tuples[0] if tuples and isinstance(value, list) else kinds[0]
        return from_json(kind, value, name)
    if origin is tuple:
        return tuple(from_json(arguments[0], item, name) for item in value)
    if kind is Path:
        return Path(value)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return value
    fields = {f.name for f in dataclasses.fields(kind)}
    if not isinstance(value, dict) or set(value) != fields:
        found = sorted(value) if isinstance(value, dict) else value
        raise ValueError(f"{name} must have the fields {sorted(fields)}, found {found}")
    hints = typing.get_type_hints(kind)
    return kind(**{k: from_json(hints[k], v, f"{name}.{k}") for k, v in value.items()})
