"""python benchmarks/kernels.py: quantizers and products on a GPU, beside a copy and the peers.

The peers of the grouped products are jax.lax.ragged_dot and torch's grouped product, where torch is
installed; of the dense ones XLA's own (cuBLAS).
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_timing import row, seconds

import jaxfp4
from jaxfp4 import products
from jaxfp4.custom_calls import absent, call
from jaxfp4.quantize import quantize_rows

BF16, F32 = jnp.bfloat16, jnp.float32
GROUPS = 128
# Outputs and inputs of a layer: the experts of Qwen3-30B-A3B, and the dense layers of Qwen3-4B.
EXPERTS = [(1536, 2048), (2048, 768)]
DENSE = [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728)]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, BF16)


def uneven(rows: int) -> jax.Array:
    """Group sizes between 0.2 and 1.2 of a common size, drawn once."""
    weights = np.random.default_rng(0).random(GROUPS) + 0.2
    ends = np.floor(np.cumsum(weights) / weights.sum() * rows + 0.5).astype(np.int32)
    return jnp.asarray(np.diff(ends, prepend=np.int32(0)))


def quantizers() -> None:
    weight = jnp.ones(2048, F32)
    copy = row("copy (-x) bf16 32768x4096", lambda x: -x, lambda seed: (normal(seed, 32768, 4096),))

    def against_copy(name: str, op: Callable[..., Any], make: Callable[[int], Any]) -> None:
        print(f"| | | {row(name, op, make) / copy:.2f} of the copy |")

    def expanded(x):
        results = [(x.shape, BF16), (x.shape[:1], F32)]
        none = absent(F32), absent(jnp.int32), absent(F32), absent(jnp.int32)
        attributes = {"front": np.int64(0), "eps": np.float32(0), "rows_per_scale": np.int64(1)}
        return call(
            "quantize_expanded",
            results,
            x,
            *none,
            pow2_scale=False,
            four_over_six=False,
            **attributes,
        )

    row_scope = functools.partial(quantize_rows, rows_per_scale=1)
    quantizer = jaxfp4.Quantizer("row")
    for m, k in ((32768, 2048), (16384, 6144)):
        against_copy(
            f"quantize {m}x{k}", jaxfp4.quantize, lambda seed, m=m, k=k: (normal(seed, m, k),)
        )
        against_copy(f"expanded {m}x{k}", expanded, lambda seed, m=m, k=k: (normal(seed, m, k),))
    against_copy(
        "SwiGLU, quantize 32768x768",
        lambda x: row_scope(x, quantizer, front=jaxfp4.SwiGLU()),
        lambda seed: (normal(seed, 32768, 1536),),
    )
    against_copy(
        "RMSNorm, quantize 32768x2048",
        lambda x: row_scope(x, quantizer, front=jaxfp4.RMSNorm(weight, 1e-6)),
        lambda seed: (normal(seed, 32768, 2048),),
    )
    against_copy(
        "gather, quantize 32768x2048",
        lambda x, rows: row_scope(x, quantizer, rows=rows),
        lambda seed: (
            normal(seed, 32768, 2048),
            jax.random.permutation(jax.random.key(seed), 32768).astype(jnp.int32),
        ),
    )
    against_copy(
        "quantize a weight 128x1536x2048, tensor scope",
        lambda w: jaxfp4.quantize(w, "tensor"),
        lambda seed: (normal(seed, GROUPS, 1536, 2048),),
    )


def flop_rate(op: Callable[..., Any], inputs: list[tuple[Any, ...]], flops: float) -> float:
    return flops / seconds(op, inputs) / 1e12


def torch_rates(rows: int, n: int, k: int) -> Iterator[float]:
    """Of torch's grouped forward, input and weight gradients."""
    import torch  # pyright: ignore[reportMissingImports]
    import triton  # pyright: ignore[reportMissingImports]

    offsets = torch.tensor(np.cumsum(np.asarray(uneven(rows))), dtype=torch.int32, device="cuda")
    x, g = (torch.randn(rows, side, device="cuda").bfloat16() for side in (k, n))
    w = torch.randn(GROUPS, n, k, device="cuda").bfloat16()
    for a, b in ((x, w.transpose(1, 2)), (g, w), (g.t(), x)):
        run = functools.partial(torch._grouped_mm, a, b, offs=offsets)
        milliseconds = triton.testing.do_bench(run, return_mode="median")
        yield 2 * rows * n * k / milliseconds / 1e9


def grouped() -> None:
    print("\n| grouped, 128 experts | forward | dx | dw | all three |\n" + "| --- " * 5 + "|")
    with_torch = importlib.util.find_spec("torch") and importlib.util.find_spec("triton")
    for rows in (32768, 131072):
        sizes = uneven(rows)
        for n, k in EXPERTS:
            flops = 2 * rows * n * k
            xs, gs = ([normal(i, rows, side) for i in range(2)] for side in (k, n))
            ws = [normal(i, GROUPS, n, k) for i in range(2)]

            def show(who, rates, rows=rows, n=n, k=k):
                together = 3 / sum(1 / rate for rate in rates)
                print(
                    f"| {who} {rows} rows, {k} to {n} | "
                    + " | ".join(f"{rate:.0f}" for rate in (*rates, together))
                    + " | TFLOP/s",
                    flush=True,
                )

            show(
                "jaxfp4",
                [
                    flop_rate(
                        lambda a, b, op=op, sizes=sizes: op(a, b, sizes, BF16),
                        list(zip(a, b, strict=True)),
                        flops,
                    )
                    for op, a, b in (
                        (products.grouped_matmul, xs, ws),
                        (products.grouped_matmul_dx, gs, ws),
                        (products.grouped_matmul_dw, gs, xs),
                    )
                ],
            )
            if with_torch:
                show("torch", list(torch_rates(rows, n, k)))


def dense(rows: int) -> None:
    print("\n| dense | forward | dx | dw |\n| --- | --- | --- | --- |")
    ours = (products.matmul, products.matmul_dx, products.matmul_dw)
    peers = (
        lambda x, w, _: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))),
        lambda g, w, _: g @ w,
        lambda g, x, _: g.T @ x,
    )
    for n, k in DENSE:
        xs, gs = ([normal(i, rows, side) for i in range(3)] for side in (k, n))
        ws = [normal(i, n, k) for i in range(3)]
        for who, ops in (("jaxfp4", ours), ("XLA", peers)):
            rates = [
                flop_rate(
                    lambda a, b, op=op: op(a, b, BF16),
                    list(zip(a, b, strict=True)),
                    2 * rows * n * k,
                )
                for op, a, b in zip(ops, (xs, gs, gs), (ws, ws, xs), strict=True)
            ]
            numbers = " | ".join(f"{rate:.0f}" for rate in rates)
            print(f"| {who} {rows} rows, {k} to {n} | {numbers} | TFLOP/s", flush=True)


if __name__ == "__main__":
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print("| work | time | traffic |\n| --- | --- | --- |")
    quantizers()
    grouped()
    dense(4096)
