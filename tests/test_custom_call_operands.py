"""Every custom call refuses a buffer of the wrong type or shape by its name, and reads nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_call_cases import BF16, BY_NAME, CASES, E4M3, F32, S32, U8, Case

from jaxfp4 import custom_calls


def assert_refused(case: Case, says: str):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"{case.name}: {says}"):
        case.run()


def buffers(case):
    return {**case.operands, **case.results}


def each_buffer():
    return [pytest.param(c, name, id=f"{c.name}-{name}") for c in CASES for name in buffers(c)]


def test_there_is_a_case_of_every_custom_call():
    assert {f"jaxfp4_{case.name}" for case in CASES} == set(custom_calls._PLATFORMS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_legal_call_runs(case):
    assert len(case.run()) == len(case.results)


@pytest.mark.parametrize(("case", "name"), each_buffer())
def test_a_wrong_type_or_number_of_axes_is_refused_by_name(case, name):
    shape, dtype = buffers(case)[name]
    assert_refused(case.change(**{name: (shape, jnp.int16)}), rf"{name} is s16 \[{shape[0]}")
    assert_refused(case.change(**{name: ((1, *shape), dtype)}), rf"{name} is \w+ \[1, {shape[0]}")
    assert_refused(case.change(**{name: ((), dtype)}), rf"{name} is \w+ \[\]")


@pytest.mark.parametrize(("case", "name"), each_buffer())
def test_a_size_that_disagrees_is_refused(case, name):
    shape, dtype = buffers(case)[name]
    for axis in range(len(shape)):
        for step, legal in ((1, case.may_grow), (-1, case.may_shrink)):
            other = (*shape[:axis], shape[axis] + step, *shape[axis + 1 :])
            changed = case.change(**{name: (other, dtype)})
            if (name, axis) in legal:
                changed.run()
            else:
                assert_refused(changed, rf"({'|'.join(buffers(case))}|rows_per_scale) is .* must ")


@pytest.mark.parametrize(
    ("case", "name"), [p for p in each_buffer() if buffers(p.values[0])[p.values[1]][1] == BF16]
)
def test_types_that_disagree_are_refused(case, name):
    changed = case.change(**{name: (buffers(case)[name][0], F32)})
    if name in case.either:
        changed.run()
    else:
        assert_refused(changed, r"\w+ is (bf16|f32) .*must be (bf16|f32) ")


ABSENT_F32, ABSENT_S32 = ((0,), F32), ((0,), S32)
NO_GROUPS = {"group_sizes": ABSENT_S32, "workspace": ((0,), U8)}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("quantize", {"x": ((5, 40), BF16)}, r"x is bf16 \[5, 40\]; .*multiple of 16"),
        ("quantize", {"x": ((5, 0), BF16)}, r"x is bf16 \[5, 0\]; .*multiple of 16"),
        ("quantize", {"front_weight": ABSENT_F32}, r"front_weight is f32 \[0\]; .*\[K=48\]"),
        ("quantize", {"block_scales": ((6, 3), U8)}, r"block_scales is u8 .*f8e4m3fn"),
        ("quantize_tiled", {"block_scales": ((1535,), U8)}, "block_scales is .* at least 1536"),
        ("quantize_tiled", {"group_sizes": ((3,), S32)}, "block_scales is .* at least 2048"),
        ("quantize_tiled", {"block_scales": ((6, 3), E4M3)}, "block_scales is f8e4m3fn .*u8"),
        ("matmul", {"a_scale": ((2,), F32)}, r"a_scale is .*\[M=6\] or \[1\] or absent"),
        ("matmul", {"b_scale": ((2,), F32)}, r"b_scale is .*\[N=4\] or \[1\] or absent"),
        ("grouped_matmul", {"b_scale": ((4,), F32)}, r"b_scale is .*\[G\*N=8\] or \[G=2\]"),
        ("grouped_matmul", {"b_scale": ((1,), F32)}, r"b_scale is .*\[G\*N=8\] or \[G=2\]"),
        ("grouped_matmul", {"group_sizes": ABSENT_S32}, "group_sizes is .*at least one group"),
        ("nvfp4_matmul", {"a_scale": ABSENT_F32}, r"a_scale is f32 \[0\]"),
        ("nvfp4_matmul", {"b_scale": ABSENT_F32}, r"b_scale is f32 \[0\]"),
        ("nvfp4_matmul", {"a_codes": ((6, 20), U8)}, r"a_codes is u8 \[6, 20\]; .*multiple of 16"),
        ("nvfp4_matmul", {"a_block_scales": ((6, 3), U8)}, "a_block_scales is u8 .*f8e4m3fn"),
        ("grouped_matmul_dw", NO_GROUPS, "group_sizes is .*at least one group"),
        ("swiglu", {"x": ((6, 17), BF16)}, r"x is bf16 \[6, 17\]; .*even"),
        ("qk_norm_rope", {"x": ((6, 3, 7), BF16)}, r"x is bf16 \[6, 3, 7\]; .*D even"),
        (
            "router_topk",
            {"weights": ((6, 6), F32), "experts": ((6, 6), S32), "given_experts": ((6, 6), S32)},
            r"weights is f32 \[6, 6\]; .*at most the 5 experts",
        ),
        ("attention", {"k": ((2, 5, 3, 16), BF16)}, "k is .*divisor of q's 4 heads"),
        ("attention", {"k": ((2, 5, 0, 16), BF16)}, "k is .*divisor of q's 4 heads"),
    ],
)
def test_what_else_is_refused(name, changes, says):
    assert_refused(BY_NAME[name].change(**changes), says)


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("front", 3, r"front is 3; .*0 \(none\), 1 \(SwiGLU\) or 2 \(RMSNorm\)"),
        ("front", -1, "front is -1"),
        ("front", 0, r"front_weight is f32 \[48\]; it must be an absent f32"),
        ("front", 1, r"x is bf16 \[5, 48\]; .*2K.* under SwiGLU"),
        ("rows_per_scale", 0, "rows_per_scale is 0; it must divide the 6 rows"),
        ("rows_per_scale", -2, "rows_per_scale is -2"),
        ("rows_per_scale", 4, "rows_per_scale is 4"),
        ("rows_per_scale", 1, r"amax is f32 \[3\]; it must be f32 \[S=6\] or absent"),
    ],
)
@pytest.mark.parametrize("name", ["quantize", "quantize_tiled", "quantize_expanded"])
def test_attributes_of_the_quantizers(name, attribute, value, says):
    case = BY_NAME[name]
    attributes = case.attributes | {attribute: np.int64(value)}
    assert_refused(dataclasses.replace(case, attributes=attributes), says)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("quantize", {"amax": ABSENT_F32, "group_sizes": ABSENT_S32}),
        ("quantize", {"x": ((6, 48), BF16), "rows": ABSENT_S32}),
        ("quantize_tiled", {"group_sizes": ABSENT_S32, "block_scales": ((512,), U8)}),
        ("matmul", {"a_scale": ABSENT_F32, "b_scale": ABSENT_F32}),
        ("matmul", {"a_scale": ((1,), F32), "b_scale": ((1,), F32)}),
        ("grouped_matmul", {"a_scale": ((1,), F32), "b_scale": ((2,), F32)}),
        ("qk_norm_rope", {"weight": ABSENT_F32}),
        ("router_topk", {"given_experts": ABSENT_S32}),
    ],
)
def test_what_may_be_absent_or_shared(name, changes):
    BY_NAME[name].change(**changes).run()
