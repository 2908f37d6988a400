"""How far a result may be from its fp64 oracle, in one table, with the reason for each entry."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """|actual - expected| <= relative * |expected| + absolute * max |expected|."""

    relative: float
    absolute: float
    reason: str


TOLERANCES = {
    "row_fp32": Tolerance(
        2e-6, 2e-7, "a few fp32 roundings (6e-8 each) and exp (2 ulp); sums are trees of 32"
    ),
    "row_bf16": Tolerance(4e-3, 2e-6, "one rounding to bf16, 2^-9, and a tie that falls elsewhere"),
    "row_grad_fp32": Tolerance(
        1e-5, 1e-6, "fp32 sums along the row and over tokens, in XLA's order, with cancellation"
    ),
    "row_grad_bf16": Tolerance(
        6e-3, 1e-4, "cotangents of a bf16 op are bf16: one rounding, then fp32 sums"
    ),
    "sharded_grad_fp32": Tolerance(
        1e-5, 2e-6, "fp32 sums over tokens in another order; a bf16 product's operands are equal"
    ),
    "sharded_grad_bf16": Tolerance(
        1e-2, 1e-2, "each device's sum over tokens is rounded to bf16 before the devices are summed"
    ),
    "angle": Tolerance(0.0, 2e-7, "sine and cosine of an fp32 angle: 2 ulp of the larger one"),
    "attention_fp32": Tolerance(
        1e-5, 2e-6, "chains of fp32 additions over the head and over the keys, never pairwise"
    ),
    "attention_bf16": Tolerance(4e-3, 1e-5, "fp32 inside, one rounding to bf16"),
    "attention_grad_fp32": Tolerance(1e-4, 1e-5, "p from the rounded lse, and dp - delta cancels"),
    "attention_grad_bf16": Tolerance(
        8e-3, 8e-3, "delta comes from the output rounded to bf16, and dp - delta cancels"
    ),
    "logprob": Tolerance(
        2e-6, 2e-6, "a chain of fp32 additions per logit; z - m - log(s) cancels to a few ulp of z"
    ),
    "logprob_grad": Tolerance(
        1e-4, 1e-5, "p from the rounded lse: its relative error is lse's absolute one"
    ),
    "logprob_grad_bf16": Tolerance(6e-3, 1e-4, "the gradient to bf16 hidden states, rounded once"),
}


def assert_close(actual, expected, name: str) -> None:
    """Asserts that actual is within TOLERANCES[name] of expected, element by element."""
    tolerance = TOLERANCES[name]
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    largest = np.abs(expected).max(initial=0.0)
    error = np.abs(actual - expected)
    allowed = tolerance.relative * np.abs(expected) + tolerance.absolute * largest
    excess = (error - allowed).max(initial=-1.0)
    assert not np.isnan(actual).any(), "NaN in the result"
    assert excess <= 0, (
        f"off by up to {error.max():.3g} where values reach {largest:.3g}; {name} allows relative "
        f"{tolerance.relative:.1g}, absolute {tolerance.absolute:.1g} of the largest: "
        f"{tolerance.reason}"
    )
