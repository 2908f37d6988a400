"""jaxfp4: NVFP4 products, quantizers and row-exact ops for JAX, as XLA custom calls."""

from jaxfp4.array import Fp4Array
from jaxfp4.attention import attention
from jaxfp4.fronts import RMSNorm, SwiGLU
from jaxfp4.grouped_linear import grouped_linear
from jaxfp4.layers import GroupedLinear, Linear
from jaxfp4.linear import linear, prepare
from jaxfp4.logprob import logits_logprob, token_logprob
from jaxfp4.policy import NVFP4, UNQUANTIZED, Policy, Quantizer, Recipe, Rule
from jaxfp4.quantize import quantize
from jaxfp4.routing import combine_experts, router_topk
from jaxfp4.rowwise import qk_norm_rope, residual_add, rmsnorm, swiglu
from jaxfp4.statistics import statistics

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
    "attention",
    "combine_experts",
    "grouped_linear",
    "linear",
    "logits_logprob",
    "prepare",
    "qk_norm_rope",
    "quantize",
    "residual_add",
    "rmsnorm",
    "router_topk",
    "statistics",
    "swiglu",
    "token_logprob",
]
