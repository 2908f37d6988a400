"""python benchmarks/gpu_rowwise.py: the row-wise ops' memory traffic on a GPU beside a copy's."""

from typing import Any

import jax
import jax.numpy as jnp
from gpu_timing import row, seconds

import jaxfp4
from jaxfp4.custom_calls import call

BF16, F32 = jnp.bfloat16, jnp.float32
EPS = 1e-6


def normal(seed: int, shape: tuple[int, ...], dtype: Any = BF16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def integers(seed: int, high: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, 0, high, jnp.int32)


def norms(rows: int) -> None:
    for width in (2048, 4096, 768):
        weight = normal(9, (width,), F32)
        row(
            f"rmsnorm bf16 {rows}x{width}",
            lambda x, weight=weight: jaxfp4.rmsnorm(x, weight, eps=EPS),
            lambda seed, width=width: (normal(seed, (rows, width)),),
        )
    weight = normal(9, (2048,), F32)
    row(
        f"rmsnorm fp32 {rows}x2048",
        lambda x: jaxfp4.rmsnorm(x, weight, eps=EPS),
        lambda seed: (normal(seed, (rows, 2048), F32),),
    )


def rotations(rows: int) -> None:
    weight, inv_freq = normal(9, (128,), F32), jnp.ones(64, F32)
    for heads in (32, 4):
        row(
            f"qk_norm_rope bf16 {rows}x{heads}x128",
            lambda x, p: jaxfp4.qk_norm_rope(x, weight, p, inv_freq, eps=EPS),
            lambda seed, heads=heads: (
                normal(seed, (rows, heads, 128)),
                integers(seed, 4096, (rows,)),
            ),
        )


def routing(rows: int) -> None:
    k = 8
    row(
        f"router_topk {rows}x128, k 8",
        lambda x: jaxfp4.router_topk(x, k, norm_topk_prob=True),
        lambda seed: (normal(seed, (rows, 128), F32),),
    )

    def combine_inputs(seed):
        slots = jax.random.permutation(jax.random.key(seed), rows * k).astype(jnp.int32)
        return (
            normal(seed, (rows * k, 2048)),
            normal(seed, (rows, k), F32),
            slots.reshape(rows, k),
        )

    row(f"combine_experts bf16 {rows}x8x2048", jaxfp4.combine_experts, combine_inputs)

    def gradient(y, weights, slots, d_out):
        results = [(y.shape, y.dtype), (weights.shape, F32)]
        return call("combine_experts_grad", results, y, weights, slots, d_out)

    row(
        f"combine_experts_grad bf16 {rows}x8x2048",
        gradient,
        lambda seed: (*combine_inputs(seed), normal(seed, (rows, 2048))),
    )


def logprobs(rows: int) -> None:
    vocabulary = 151936
    for temperature in (1.0, 0.6):
        row(
            f"logits_logprob {rows}x{vocabulary}, temperature {temperature}",
            lambda x, t, temperature=temperature: jaxfp4.logits_logprob(
                x, t, temperature=temperature
            ),
            lambda seed: (normal(seed, (rows, vocabulary), F32), integers(seed, 9, (rows,))),
        )
    head = normal(1, (vocabulary, 2048))
    hidden, tokens = normal(0, (8 * rows, 2048)), integers(0, vocabulary, (8 * rows,))
    time_each = seconds(jaxfp4.token_logprob, [(hidden, head, tokens)])
    flops = 2 * hidden.size * vocabulary
    print(
        f"| token_logprob bf16 {8 * rows}x2048, vocabulary {vocabulary} | {time_each * 1e3:.2f} ms "
        f"| {flops / time_each / 1e12:.0f} TFLOP/s |"
    )


if __name__ == "__main__":
    print(f"{jax.devices()[0].device_kind}\n\n| work | time | traffic |\n| --- | --- | --- |")
    row("copy (-x) bf16 32768x4096", lambda x: -x, lambda seed: (normal(seed, (32768, 4096)),))
    for size in (32768, 64):
        norms(size)
        row(
            f"swiglu bf16 {size}x1536",
            jaxfp4.swiglu,
            lambda seed, size=size: (normal(seed, (size, 1536)),),
        )
        rotations(size)
        routing(min(size, 8192))
    logprobs(1024)
    logprobs(8)
