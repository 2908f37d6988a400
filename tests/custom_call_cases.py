"""A legal call of every custom call, with every operand given, and which changes leave it legal."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp4.custom_calls import call

BF16, F32, S32, U8, E4M3 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint8, jnp.float8_e4m3fn

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """Buffers are (shape, dtype) by name, operands before results.

    may_grow, may_shrink: (buffer, axis) pairs whose size may change by one without any other.
    either: bf16 buffers that may be fp32 without any other.
    """

    name: str
    operands: dict[str, tuple[Shape, Any]]
    results: dict[str, tuple[Shape, Any]]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    may_grow: frozenset[tuple[str, int]] = frozenset()
    may_shrink: frozenset[tuple[str, int]] = frozenset()
    either: frozenset[str] = frozenset()

    def change(self, **buffers: tuple[Shape, Any]) -> "Case":
        return dataclasses.replace(
            self,
            operands={name: buffers.get(name, was) for name, was in self.operands.items()},
            results={name: buffers.get(name, was) for name, was in self.results.items()},
        )

    def run(self) -> Any:
        """Zeros go in; group sizes of zero are legal, and so is every index that a call takes."""
        operands = [jnp.zeros(shape, dtype) for shape, dtype in self.operands.values()]
        results = list(self.results.values())
        return jax.block_until_ready(call(self.name, results, *operands, **self.attributes))


def _quantize(name: str, results: dict[str, tuple[Shape, Any]], may_grow: str) -> Case:
    return Case(
        name,
        {
            "x": ((5, 48), BF16),
            "front_weight": ((48,), F32),
            "rows": ((6,), S32),
            "amax": ((3,), F32),
            "group_sizes": ((2,), S32),
        },
        {**results, "scale": ((3,), F32)},
        {
            "front": np.int64(2),
            "eps": np.float32(1e-6),
            "rows_per_scale": np.int64(2),
            "pow2_scale": False,
            "four_over_six": False,
        },
        may_grow=frozenset({("x", 0), (may_grow, 0)}),
        may_shrink=frozenset({("x", 0), ("group_sizes", 0)}),
        either=frozenset({"x"}),
    )


_CODES = ((6, 24), U8)
_A, _B, _G, _Y = ((6, 48), BF16), ((4, 48), BF16), ((6, 4), BF16), ((6, 4), BF16)
_SCALES = {"a_scale": ((6,), F32), "b_scale": ((4,), F32)}
_GROUPED_SCALES = {"a_scale": ((6,), F32), "b_scale": ((8,), F32)}
_SIZES = {"group_sizes": ((2,), S32)}
_WORKSPACE = {"workspace": ((512,), U8)}
_ROOMY = frozenset({("workspace", 0)})
_NVFP4_A = {"a_codes": _CODES, "a_block_scales": ((6, 3), E4M3), "a_scale": ((6,), F32)}
_ROWS = {"tokens": ((6,), S32), "temperature": ((6,), F32)}
_LOGPROBS = dict.fromkeys(("logprob", "entropy", "lse"), ((6,), F32))
_QUERIES, _KEYS = ((2, 3, 4, 16), BF16), ((2, 5, 2, 16), BF16)
_ATTENTION = {
    "q": _QUERIES,
    "k": _KEYS,
    "v": _KEYS,
    "key_start": ((2, 3), S32),
    "key_end": ((2, 3), S32),
}
_COMBINE = {"y": ((7, 8), BF16), "weights": ((6, 2), F32), "slots": ((6, 2), S32)}

CASES = [
    _quantize("quantize", {"codes": _CODES, "block_scales": ((6, 3), E4M3)}, "group_sizes"),
    # Tiles of 128 rows for 6 + 128 * 2 rows: 3, of one tile of blocks.
    _quantize(
        "quantize_tiled",
        {"codes": _CODES, "block_scales": ((3 * 512,), U8)},
        "block_scales",
    ),
    _quantize("quantize_expanded", {"values": ((6, 48), BF16)}, "group_sizes"),
    Case(
        "nvfp4_matmul",
        {
            **_NVFP4_A,
            "b_codes": ((4, 24), U8),
            "b_block_scales": ((4, 3), E4M3),
            "b_scale": ((4,), F32),
        },
        {"y": _Y},
        either=frozenset({"y"}),
    ),
    Case(
        "nvfp4_grouped_matmul",
        {
            **_NVFP4_A,
            "b_codes": ((2, 4, 24), U8),
            "b_block_scales": ((2, 4, 3), E4M3),
            "b_scale": ((8,), F32),
            **_SIZES,
        },
        {"y": _Y, **_WORKSPACE},
        may_grow=_ROOMY,
        either=frozenset({"y"}),
    ),
    Case("matmul", {"a": _A, "b": _B, **_SCALES}, {"y": _Y}, either=frozenset({"y"})),
    Case(
        "grouped_matmul",
        {"a": _A, "b": ((2, 4, 48), BF16), **_GROUPED_SCALES, **_SIZES},
        {"y": _Y, **_WORKSPACE},
        may_grow=_ROOMY,
        either=frozenset({"y"}),
    ),
    Case("matmul_dx", {"g": _G, "w": _B}, {"dx": _A}, either=frozenset({"dx"})),
    Case(
        "grouped_matmul_dx",
        {"g": _G, "w": ((2, 4, 48), BF16), **_SIZES},
        {"dx": _A, **_WORKSPACE},
        may_grow=_ROOMY,
        either=frozenset({"dx"}),
    ),
    Case("matmul_dw", {"g": _G, "x": _A}, {"dw": _B}, either=frozenset({"dw"})),
    Case(
        "grouped_matmul_dw",
        {"g": _G, "x": _A, **_SIZES},
        {"dw": ((2, 4, 48), BF16), **_WORKSPACE},
        may_grow=_ROOMY,
        either=frozenset({"dw"}),
    ),
    Case(
        "rmsnorm",
        {"x": ((6, 8), BF16), "weight": ((8,), F32)},
        {"y": ((6, 8), BF16)},
        {"eps": np.float32(1e-6)},
    ),
    Case("swiglu", {"x": ((6, 16), BF16)}, {"y": ((6, 8), BF16)}),
    Case(
        "qk_norm_rope",
        {
            "x": ((6, 3, 8), BF16),
            "weight": ((8,), F32),
            "positions": ((6,), S32),
            "inv_freq": ((4,), F32),
        },
        {"y": ((6, 3, 8), BF16)},
        {"eps": np.float32(1e-6)},
    ),
    Case(
        "router_topk",
        {"logits": ((6, 5), F32), "given_experts": ((6, 2), S32)},
        {"weights": ((6, 2), F32), "experts": ((6, 2), S32)},
        {"norm_topk_prob": True},
        may_grow=frozenset({("logits", 1)}),
        may_shrink=frozenset({("logits", 1)}),
    ),
    Case(
        "combine_experts",
        _COMBINE,
        {"out": ((6, 8), BF16)},
        may_grow=frozenset({("y", 0)}),
        may_shrink=frozenset({("y", 0)}),
    ),
    Case(
        "combine_experts_grad",
        {**_COMBINE, "d_out": ((6, 8), BF16)},
        {"dy": ((7, 8), BF16), "dweights": ((6, 2), F32)},
    ),
    Case(
        "attention",
        _ATTENTION,
        {"o": _QUERIES, "lse": ((2, 3, 4), F32)},
        {"scale": np.float32(0.25)},
    ),
    Case(
        "attention_grad",
        {**_ATTENTION, "o": _QUERIES, "lse": ((2, 3, 4), F32), "do": _QUERIES},
        {"dq": _QUERIES, "dk": _KEYS, "dv": _KEYS},
        {"scale": np.float32(0.25)},
    ),
    Case(
        "token_logprob",
        {"hidden": ((6, 8), BF16), "head": ((9, 8), BF16), **_ROWS},
        _LOGPROBS,
        may_grow=frozenset({("head", 0)}),
        may_shrink=frozenset({("head", 0)}),
    ),
    Case(
        "logits_logprob",
        {"logits": ((6, 9), F32), **_ROWS},
        _LOGPROBS,
        may_grow=frozenset({("logits", 1)}),
        may_shrink=frozenset({("logits", 1)}),
    ),
    Case(
        "logprob_chunk",
        {"logits": ((6, 9), F32), **_ROWS, "state": ((6, 4), F32)},
        {"new_state": ((6, 4), F32), **_LOGPROBS},
        may_grow=frozenset({("logits", 1)}),
        may_shrink=frozenset({("logits", 1)}),
    ),
]

BY_NAME = {case.name: case for case in CASES}
