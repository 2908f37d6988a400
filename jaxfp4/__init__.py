"""jaxfp4: NVFP4 products, quantizers and row-exact ops for JAX, as XLA custom calls."""

from jaxfp4.array import Fp4Array
from jaxfp4.fronts import RMSNorm, SwiGLU
from jaxfp4.grouped_linear import grouped_linear
from jaxfp4.layers import GroupedLinear, Linear
from jaxfp4.linear import linear, prepare
from jaxfp4.policy import NVFP4, UNQUANTIZED, Policy, Quantizer, Recipe, Rule
from jaxfp4.quantize import quantize

__all__ = [
    "NVFP4",
    "UNQUANTIZED",
    "Fp4Array",
    "GroupedLinear",
    "Linear",
    "Policy",
    "Quantizer",
    "RMSNorm",
    "Recipe",
    "Rule",
    "SwiGLU",
    "grouped_linear",
    "linear",
    "prepare",
    "quantize",
]
