"""The recipes: plain functions that return a `Run`. Copy one to make your own.

* `tiny`: the main job; a policy of 10^5 parameters learns sums on two CPU cores in minutes.
* `qwen3_4b`, `qwen3_30b_a3b`: GRPO on a Hugging Face checkpoint; checkpoint and data are given on
  the command line.
"""

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
from train.grpo import LossConfig
from train.tasks import ARITHMETIC_ALPHABET, Arithmetic
from train.tokenizer import CharTokenizer


def tiny() -> Run:
    """A small Qwen3 MoE from random weights: supervised until it knows the format, then GRPO."""
    # The answer's last digit first: the carry is found in the order in which it is needed.
    problems = Arithmetic(low=0, high=49, width=2, reverse_answer=True)
    return Run(
        name="tiny",
        model=Model(
            architecture=Qwen3Config(
                vocab_size=CharTokenizer(ARITHMETIC_ALPHABET).vocab_size,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=64,
                rope_theta=10_000.0,
                initializer_range=0.1,
                max_position_embeddings=64,
            ),
        ),
        data=Data(kind="arithmetic", arithmetic=problems),
        sampling=Sampling(max_new_tokens=problems.max_answer_length + 1),
        grpo=Grpo(steps=300, prompts=64, group_size=8, micro_batch=512),
        optimizer=Optimizer(learning_rate=4e-4, warmup_steps=5, beta2=0.99),
        supervised=Supervised(
            accuracy=0.35,
            max_steps=1000,
            batch=256,
            check_every=10,
            optimizer=Optimizer(learning_rate=3e-3, warmup_steps=20),
        ),
        evaluation=Evaluation(prompts=512, temperature=1.0),
        checkpoints=Checkpoints(every=50),
    )


def qwen3_4b() -> Run:
    """Qwen3-4B on grade-school mathematics."""
    return Run(
        name="qwen3-4b",
        model=Model(quantization="last-15-percent-bf16", remat="block"),
        data=Data(kind="gsm8k"),
        sampling=Sampling(max_new_tokens=2048, micro_batch=64),
        grpo=Grpo(steps=200, prompts=64, group_size=8, micro_batch=8),
        optimizer=Optimizer(learning_rate=1e-6, warmup_steps=10),
    )


def qwen3_30b_a3b() -> Run:
    """Qwen3-30B-A3B (mixture of experts) on competition mathematics, as in DAPO."""
    return Run(
        name="qwen3-30b-a3b",
        model=Model(quantization="last-15-percent-bf16", remat="block"),
        data=Data(kind="dapo"),
        sampling=Sampling(max_new_tokens=8192, micro_batch=64),
        grpo=Grpo(
            steps=200,
            prompts=64,
            group_size=16,
            micro_batch=4,
            old_logprob="recompute",
            resample=2,
            overlong_buffer=1024,
        ),
        loss=LossConfig(sampler_ratio_cap=2.0),
        optimizer=Optimizer(learning_rate=1e-6, warmup_steps=10, weight_decay=0.1),
    )
