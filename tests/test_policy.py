"""Policies: which layer gets which recipe, and what a recipe may say."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxfp4
from jaxfp4 import NVFP4, UNQUANTIZED, Policy, Quantizer, Recipe, Rule
from jaxfp4.policy import all_linears, experts_only, last_layers_unquantized, none

OTHER = Recipe(backward="dequantized")
NAMES = [
    f"layers.{layer}.{part}"
    for layer in range(20)
    for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts.down_proj")
]


def test_the_first_match_decides():
    policy = Policy([Rule("layers.7.*", OTHER), Rule("layers.*", NVFP4)])
    assert policy.recipe_for("layers.7.mlp.down_proj") == OTHER
    assert policy.recipe_for("layers.70.mlp.down_proj") == NVFP4
    assert policy.recipe_for("lm_head") == UNQUANTIZED


@pytest.mark.parametrize(
    "rules",
    [
        [Rule("layers.99.*", NVFP4)],
        [Rule("layers.*", NVFP4), Rule("layers.7.*", OTHER)],
        [Rule("layers.*", NVFP4), Rule("layers.*", NVFP4)],
    ],
)
def test_a_rule_that_decides_nothing_is_an_error(rules):
    with pytest.raises(ValueError, match=f"rule {rules[-1].glob!r} decides for no layer"):
        Policy(rules).check_used(NAMES)


def test_presets():
    assert {all_linears().recipe_for(name) for name in NAMES} == {NVFP4}
    assert {none().recipe_for(name) for name in NAMES} == {UNQUANTIZED}
    for name in NAMES:
        assert experts_only().recipe_for(name) == (NVFP4 if "experts" in name else UNQUANTIZED)
        last = name.startswith(("layers.17.", "layers.18.", "layers.19."))
        recipe = last_layers_unquantized(20).recipe_for(name)
        assert recipe == (UNQUANTIZED if last else NVFP4)
    for policy in (all_linears(), experts_only(), last_layers_unquantized(20), none()):
        policy.check_used(NAMES)


@given(st.integers(1, 200), st.integers(1, 99))
def test_the_last_fraction_is_rounded_up(layers, percent):
    policy = last_layers_unquantized(layers, percent / 100)
    quantised = sum(policy.recipe_for(f"layers.{i}.o") == NVFP4 for i in range(layers))
    assert quantised == layers - math.ceil(layers * percent / 100 - 1e-9)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Quantizer("column"), ValueError, "scope must be 'row' or 'tensor'.*'column'"),
        (lambda: Quantizer(pow2_scale=1), TypeError, "pow2_scale must be True or False, got 1"),
        (lambda: Recipe(backward="exact"), ValueError, "backward must be.*'exact'"),
        (lambda: Recipe(activation=None), ValueError, "both operands or neither"),
        (lambda: Recipe(activation="row"), TypeError, "activation must be a Quantizer.*'row'"),
        (lambda: Recipe(None, None, "dequantized"), ValueError, "backward must be 'original'"),
        (lambda: Rule("a", None), TypeError, "recipe must be a Recipe, got None for 'a'"),
        (lambda: Policy(["a"]), TypeError, "rules must be Rule objects, got 'a'"),
        (lambda: last_layers_unquantized(0), ValueError, "num_layers.*0"),
        (lambda: last_layers_unquantized(4, 1.5), ValueError, "fraction.*1.5"),
        (lambda: jaxfp4.prepare(None, None), TypeError, "recipe must be a jaxfp4.Recipe"),
    ],
)
def test_what_is_not_legal_says_so(make, error, says):
    with pytest.raises(error, match=says):
        make()
