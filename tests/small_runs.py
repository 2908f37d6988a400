"""Whole runs that are small enough for a test, and a reward that varies."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from models import Qwen3Config
from train.config import (
    Checkpoints,
    Data,
    Evaluation,
    Grpo,
    Model,
    Optimizer,
    Run,
    Sampling,
    Supervised,
)
from train.data import Example
from train.grpo import LossConfig
from train.main import start
from train.tasks import Arithmetic


def architecture(vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        initializer_range=0.2,
    )


def digits(examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
    """A reward that an untrained policy can earn: the share of odd digits."""
    return [sum(c in "13579" for c in r) / max(1, len(r)) for r in responses]


def letters(examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
    """The share of ASCII letters in a response."""
    return [sum(c.isascii() and c.isalpha() for c in r) / max(1, len(r)) for r in responses]


def arithmetic(folder: Path, steps: int, **grpo) -> Run:
    return Run(
        name="small",
        model=Model(architecture=architecture(14)),
        data=Data(kind="arithmetic", arithmetic=Arithmetic(high=9), reward="small_runs:digits"),
        sampling=Sampling(max_new_tokens=3),
        grpo=Grpo(**({"steps": steps, "prompts": 4, "group_size": 4, "micro_batch": 8} | grpo)),
        # A reference policy and two epochs: everything that a checkpoint has to hold.
        loss=LossConfig(kl_coef=0.01),
        optimizer=Optimizer(learning_rate=1e-2, warmup_steps=8, weight_decay=0.01),
        supervised=Supervised(accuracy=0.6, max_steps=2, batch=8, check_every=2),
        evaluation=Evaluation(prompts=8, temperature=1.0),
        checkpoints=Checkpoints(every=5, keep=2),
        folder=folder,
    )


def gsm8k(folder: Path, shared_data: Path, reward: str | None) -> Run:
    return Run(
        name="gsm8k",
        model=Model(architecture=architecture(151_936)),
        data=Data(
            kind="gsm8k",
            path=shared_data / "gsm8k" / "train.jsonl",
            heldout=shared_data / "gsm8k" / "test.jsonl",
            tokenizer=shared_data / "tokenizer",
            reward=reward,
            prompt_slots=72,
        ),
        sampling=Sampling(max_new_tokens=4),
        grpo=Grpo(steps=5, prompts=2, group_size=4, micro_batch=8),
        optimizer=Optimizer(learning_rate=1e-2),
        evaluation=Evaluation(prompts=8, temperature=1.0),
        checkpoints=Checkpoints(every=1),
        folder=folder,
    )


def slow_letters(examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
    """`letters`, slow enough that a test can kill the run between two steps."""
    time.sleep(0.5)
    return letters(examples, responses)


if __name__ == "__main__":
    start(gsm8k(Path(sys.argv[1]), Path(sys.argv[2]), "small_runs:slow_letters"))
