"""What a quantizer is tried on: classes of inputs x dtypes x options, with the oracle's answers."""

import functools
from dataclasses import dataclass

import inputs
import numpy as np
import oracle
import pytest


@dataclass(frozen=True)
class Options:
    """A quantizer's options; `given_amax` tries the amaxes of `inputs.make_amax`."""

    scope: str = "row"
    pow2_scale: bool = False
    four_over_six: bool = False
    given_amax: bool = False

    @property
    def static(self) -> dict[str, str | bool]:
        """The keyword arguments that are not arrays."""
        return {
            "scope": self.scope,
            "pow2_scale": self.pow2_scale,
            "four_over_six": self.four_over_six,
        }

    def amax(self, x: np.ndarray) -> np.ndarray | None:
        return inputs.make_amax(x, self.scope) if self.given_amax else None

    def __str__(self) -> str:
        names = [name for name, on in vars(self).items() if on is True]
        return "-".join([self.scope, *names])


OPTIONS = [
    Options("row"),
    Options("tensor"),
    Options("row", pow2_scale=True),
    Options("row", four_over_six=True),
    Options("tensor", pow2_scale=True, four_over_six=True),
    Options("row", given_amax=True),
    Options("tensor", given_amax=True),
    Options("row", pow2_scale=True, four_over_six=True, given_amax=True),
]


@functools.cache
def make(name: str, dtype: str, n: int = 1_000_000) -> np.ndarray:
    """`inputs.make`, kept and read-only."""
    x = inputs.make(name, dtype, n)
    x.setflags(write=False)
    return x


@functools.cache
def expected(name: str, dtype: str, options: Options) -> oracle.Quantized:
    """The oracle's answer for a million values of a class."""
    x = make(name, dtype)
    return oracle.quantize(x, **options.static, amax=options.amax(x))


every_class = pytest.mark.parametrize("name", inputs.CLASSES)
every_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES)
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def bits(x: object) -> np.ndarray:
    """An array of 8, 16 or 32-bit numbers as unsigned integers."""
    array = np.asarray(x)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bytes(actual: object, desired: object) -> None:
    """Both are arrays, or sequences of arrays that are compared one by one."""
    if isinstance(actual, tuple):
        for a, d in zip(actual, desired, strict=True):
            assert_same_bytes(a, d)
        return
    np.testing.assert_array_equal(bits(actual), bits(desired))
