"""Fp4Array: an NVFP4 tensor as a plain pytree.

    value[..., k] = e2m1(code[..., k]) * float(block_scale[..., k // 16]) * scale

It is data and nothing else: it can be sliced by `lax.scan`, sharded, donated and saved leaf by
leaf. Arithmetic on it raises, because there is no product or sum of 4-bit numbers that would not
first choose how to dequantise; say `.dequantize()` or pass it to `linear(..., quantized=...)`.
"""

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxfp4 import reference


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Fp4Array:
    """An NVFP4 tensor of logical shape [..., K].

    Attributes:
      codes: uint8 [..., K/2], two e2m1 codes a byte, the even k in the low nibble.
      block_scales: float8_e4m3fn [..., K/16], row-major.
      scale: float32. Shape [...] (one a row) for scope "row", [...][:-1] (one a matrix) for
        scope "tensor".
    """

    codes: jax.Array
    block_scales: jax.Array
    scale: jax.Array

    # NumPy and JAX leave binary operators to this class, which has none.
    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., K]."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def scope(self) -> str:
        """ "row" or "tensor": what shares one fp32 scale."""
        return "row" if self.scale.ndim == self.codes.ndim - 1 else "tensor"

    def values(self) -> jax.Array:
        """Code times block scale, [..., K] in bfloat16. Exact: it has six significant bits."""
        return reference.operand(self.codes, self.block_scales)

    def dequantize(self, dtype: Any = jnp.bfloat16) -> jax.Array:
        """code * block_scale * scale, [..., K], the product in fp32 and rounded once to `dtype`."""
        return reference.dequantize(self.codes, self.block_scales, self.scale, dtype)

    def _no_arithmetic(self, *_: Any) -> NoReturn:
        raise TypeError(
            "Fp4Array has no arithmetic: use .dequantize(), or linear(x, w, quantized=...)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_arithmetic
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __neg__ = __array__ = _no_arithmetic
