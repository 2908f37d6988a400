"""python -m jaxfp4.selftest: what runs on this machine, checked and timed.

Quantizers are compared byte for byte with plain jnp (on the CPU; elsewhere XLA's division is not
IEEE and the CPU's own bytes are the reference), products with a product of the same exact operands
in float64, grouped products bit for bit with dense ones. Times are medians beside XLA's own fp32 or
bf16 product in the same run. Exits with 1 if anything is wrong; `--json FILE` writes the table.

Left out: the speed of a whole model, which benchmarks/ measure.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp4
from jaxfp4 import reference

_SHAPES = [(1, 256, 256), (33, 512, 272), (256, 1024, 1024)]  # rows, outputs, depth
_GROUP_SIZES = {
    "ragged": [13, 0, 50, 1],
    "one group": [0, 64, 0, 0],
    "tail unused": [5, 7, 0, 9],
}


@dataclasses.dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    ok: bool
    detail: str


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _same_bytes(a, b) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


def check_quantizers() -> Iterator[Check]:
    """Every option against plain jnp on the CPU, byte for byte."""
    x = jnp.asarray(_normal(0, 64, 512)).astype(jnp.bfloat16)
    x = x.at[3].set(0).at[5, 7].set(jnp.nan).at[9].multiply(jnp.bfloat16(1e-30))
    cpu = jax.devices("cpu")[0]
    for scope in ("row", "tensor"):
        for pow2_scale in (False, True):
            for four_over_six in (False, True):
                options = (scope, pow2_scale, four_over_six)
                value = x if scope == "row" else jnp.nan_to_num(x)
                q = jaxfp4.quantize(value, *options)
                with jax.default_device(cpu):
                    expected = reference.quantize(jax.device_put(value, cpu), *options)
                same = _same_bytes((q.codes, q.block_scales, q.scale), expected)
                yield Check(f"quantize {options}", same, "bytes equal" if same else "BYTES DIFFER")


def check_products() -> Iterator[Check]:
    """linear against a float64 product of its exact operands, within fp32 summation error."""
    for rows, outputs, depth in _SHAPES:
        x = jnp.asarray(_normal(1, rows, depth)).astype(jnp.bfloat16)
        w = jnp.asarray(_normal(2, outputs, depth)).astype(jnp.bfloat16)
        y = np.asarray(jaxfp4.linear(x, w, out_dtype=jnp.float32), np.float64)
        a, b = jaxfp4.quantize(x), jaxfp4.quantize(w, "tensor")
        a64 = np.asarray(a.values(), np.float64) * np.asarray(a.scale, np.float64)[:, None]
        b64 = np.asarray(b.values(), np.float64) * float(b.scale)
        bound = (depth + 4) * 2.0**-24 * (np.abs(a64) @ np.abs(b64).T)
        worst = float((np.abs(y - a64 @ b64.T) / bound).max())
        yield Check(f"linear {rows}x{outputs}x{depth}", worst <= 1, f"error {worst:.1%} of bound")


def check_groups() -> Iterator[Check]:
    """grouped_linear bit for bit against linear, group by group."""
    x = jnp.asarray(_normal(3, 64, 256)).astype(jnp.bfloat16)
    w = jnp.asarray(_normal(4, 4, 128, 256))
    for name, sizes in _GROUP_SIZES.items():
        y = jaxfp4.grouped_linear(x, w, jnp.asarray(sizes, jnp.int32))
        ends = np.cumsum(sizes)
        same = not np.asarray(y[ends[-1] :], np.float32).any()
        for group, end in enumerate(ends):
            rows = slice(end - sizes[group], end)
            same &= _same_bytes(y[rows], jaxfp4.linear(x[rows], w[group]))
        yield Check(f"grouped_linear {name}", same, "bits equal" if same else "BITS DIFFER")


def check_row_bits() -> Iterator[Check]:
    """A row alone and in a batch: the same bits through linear and attention."""
    x = jnp.asarray(_normal(5, 96, 256)).astype(jnp.bfloat16)
    w = jnp.asarray(_normal(6, 128, 256))
    same = _same_bytes(jaxfp4.linear(x, w)[40:41], jaxfp4.linear(x[40:41], w))
    yield Check("a row of linear, alone", same, "bits equal" if same else "BITS DIFFER")
    q, k, v = (jnp.asarray(_normal(7 + i, 1, 96, 2, 64)).astype(jnp.bfloat16) for i in range(3))
    start = jnp.zeros((1, 96), jnp.int32)
    end = jnp.arange(1, 97, dtype=jnp.int32)[None]
    whole = jaxfp4.attention(q, k, v, start, end)
    one = jaxfp4.attention(q[:, 90:91], k, v, start[:, 90:91], end[:, 90:91])
    same = _same_bytes(whole[:, 90:91], one)
    yield Check("prefill and decode of attention", same, "bits equal" if same else "BITS DIFFER")


def median_seconds(function: Callable[[], jax.Array], repeats: int = 7) -> float:
    """The median of a few calls after one to warm up."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def timings() -> Iterator[Check]:
    """linear with a prepared weight beside XLA's product; never wrong, only slow."""
    rows, outputs, depth = 512, 2048, 2048
    x = jnp.asarray(_normal(8, rows, depth)).astype(jnp.bfloat16)
    w = jnp.asarray(_normal(9, outputs, depth))
    q = jaxfp4.prepare(w, jaxfp4.NVFP4)
    linear = jax.jit(lambda x, w, q: jaxfp4.linear(x, w, quantized=q))
    xla = jax.jit(lambda x, w: x @ w.T)
    ours = median_seconds(lambda: linear(x, w, q))
    x32 = x.astype(jnp.float32)
    theirs = median_seconds(lambda: xla(x32, w))
    tflops = 2 * rows * outputs * depth / ours / 1e12
    detail = f"{ours * 1e3:.1f} ms, {tflops:.3f} TFLOP/s, {ours / theirs:.2f}x XLA's fp32 product"
    yield Check(f"time of linear {rows}x{outputs}x{depth}", True, detail)


def run() -> list[Check]:
    """All checks and timings, in order."""
    parts = (check_quantizers, check_products, check_groups, check_row_bits, timings)
    return [check for part in parts for check in part()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxfp4.selftest", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    machine = {
        "device": f"{device.platform}: {device.device_kind}",
        "jaxfp4": importlib.metadata.version("jaxfp4"),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": sys.version.split()[0],
    }
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    checks = run()
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{'ok   ' if check.ok else 'WRONG'}  {check.name:<{width}}  {check.detail}")
    wrong = sum(not check.ok for check in checks)
    print(f"{len(checks) - wrong} of {len(checks)} as they should be")
    if arguments.json is not None:
        report = {"machine": machine, "checks": [dataclasses.asdict(check) for check in checks]}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
