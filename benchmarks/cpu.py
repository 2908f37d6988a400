"""python benchmarks/cpu.py: the CPU kernels beside XLA's own, as ratios in one run.

Both sides are compiled and warmed up; they are timed in turn, call by call, and the ratio is
that of the medians, so that whatever else the machine does falls on both.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp4
from jaxfp4 import reference


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


Call = tuple[Callable[..., object], tuple[Any, ...]]


def medians(*calls: Call, repeats: int = 15) -> list[float]:
    """Median milliseconds of each (function, arguments), timed in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 2):
        for (function, arguments), seconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            if repeat >= 2:
                seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) * 1e3 for seconds in times]


def row(work: str, times: list[float], peer: str, mark: str) -> None:
    ours, theirs = times
    print(f"| {work} | {ours:.2f} ms | {theirs:.2f} ms | {peer} | {ours / theirs:.2f} | {mark} |")


def quantize() -> None:
    for dtype in (jnp.bfloat16, jnp.float32):
        x = normal(0, 4096, 2048).astype(dtype)
        ours, plain = jax.jit(jaxfp4.quantize), jax.jit(reference.quantize)
        times = medians((ours, (x,)), (plain, (x,)))
        row(f"quantize 4096x2048 {x.dtype}", times, "plain jnp", "at most 0.33")


def linear() -> None:
    for rows in (512, 16, 1):
        x, w = normal(0, rows, 2048).astype(jnp.bfloat16), normal(1, 2048, 2048)
        q = jaxfp4.prepare(w, jaxfp4.NVFP4)
        ours = jax.jit(lambda x, w, q: jaxfp4.linear(x, w, quantized=q))
        dot = jax.jit(lambda x, w: x @ w.T)
        x32 = x.astype(jnp.float32)
        times = medians((ours, (x, w, q)), (dot, (x32, w)))
        row(
            f"linear {rows}x2048x2048, quantise included",
            times,
            "XLA fp32 dot",
            "at most 2" if rows == 512 else "-",
        )


def gradient(function: Callable[..., jax.Array]) -> Callable[..., object]:
    """The compiled gradient of the sum of function's squares."""

    def loss(q, k, v):
        return jnp.sum(function(q, k, v).astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss, (0, 1, 2)))


def attention() -> None:
    batch, tokens, heads, kv_heads, dim = 2, 512, 8, 2, 64
    start = jnp.zeros((batch, tokens), jnp.int32)
    end = jnp.broadcast_to(jnp.arange(1, tokens + 1, dtype=jnp.int32), (batch, tokens))
    for dtype in (jnp.float32, jnp.bfloat16):
        q = normal(0, batch, tokens, heads, dim).astype(dtype)
        k, v = (normal(i, batch, tokens, kv_heads, dim).astype(dtype) for i in (1, 2))

        def ours(q, k, v):
            return jaxfp4.attention(q, k, v, start, end)

        def theirs(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        pairs = {
            "forward": (jax.jit(ours), jax.jit(theirs)),
            "forward and backward": (gradient(ours), gradient(theirs)),
        }
        for name, (a, b) in pairs.items():
            times = medians((a, (q, k, v)), (b, (q, k, v)))
            row(f"attention 2x512x8/2x64 {q.dtype} {name}", times, "jax.nn", "at most 2")


def main() -> None:
    print(f"jax {jax.__version__}, {jax.local_devices()[0].device_kind}")
    print("| work | ours | peer | who | ratio | mark |\n| --- | --- | --- | --- | --- | --- |")
    quantize()
    linear()
    attention()


if __name__ == "__main__":
    main()
