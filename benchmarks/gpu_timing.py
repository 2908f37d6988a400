"""Timing an op on a GPU through JAX.

A program runs an op on several inputs of its own, together larger than the L2 cache; the time of
one op is the program's, the median of several, divided by their number. Traffic counts what the op
must read and write once.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

TIMES, CALLS = 7, 4


def seconds(op: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> float:
    """Of one op, each of `inputs` its operands once."""
    program = jax.jit(lambda inputs: [op(*operands) for operands in inputs])
    jax.block_until_ready(program(inputs))
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        for _ in range(CALLS):
            results = program(inputs)
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / CALLS / len(inputs))
    return statistics.median(times)


def traffic(*trees: Any) -> int:
    """Bytes of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))


def row(name: str, op: Callable[..., Any], make: Callable[[int], tuple[Any, ...]]) -> float:
    """Prints a row of a table and returns the traffic in bytes a second.

    `make(seed)` gives operands. Small ops run on many inputs, to hide the launches.
    """
    bytes_each = traffic(make(0), jax.eval_shape(op, *make(0)))
    count = int(np.clip(2e9 // bytes_each, 2, 32))
    time_each = seconds(op, [make(seed) for seed in range(count)])
    rate = bytes_each / time_each
    print(f"| {name} | {time_each * 1e6:.1f} us | {rate / 1e12:.2f} TB/s |", flush=True)
    return rate
