"""Which layer is quantised how: Quantizer, Recipe, and Policy, an ordered list of rules.

A policy decides nothing about how a product is computed; it maps a layer's name, such as
`layers.7.mlp.down_proj`, to the recipe of the first rule whose glob matches. A layer that no
rule matches is not quantised. A rule that no layer uses is an error, since it is almost always a
misspelt name.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Iterable
from typing import Literal

Scope = Literal["row", "tensor"]
Backward = Literal["original", "dequantized"]


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        legal = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be {legal}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """How one operand is quantised.

    Attributes:
      scope: what shares one fp32 scale. "row": each row of the operand (a token, or an output
        of a weight); "tensor": the whole activation, or each matrix of a weight.
      pow2_scale: round the fp32 scale up to a power of two, so that codes do not move with amax.
      four_over_six: per block, take the block scale that maps the largest value to 6 or to 4,
        whichever has the smaller squared error.
    """

    scope: Scope = "row"
    pow2_scale: bool = False
    four_over_six: bool = False

    def __post_init__(self):
        _check_choice("scope", self.scope, ("row", "tensor"))
        for name in ("pow2_scale", "four_over_six"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a linear layer is quantised: both operands of its forward product, or neither.

    Attributes:
      activation, weight: their quantizers; both None for a plain BF16 product.
      backward: the operands of the two BF16 backward products: "original", x and w rounded to
        bf16, or "dequantized", the values that the forward product used.
    """

    activation: Quantizer | None = Quantizer("row")
    weight: Quantizer | None = Quantizer("tensor")
    backward: Backward = "original"

    def __post_init__(self):
        _check_choice("backward", self.backward, ("original", "dequantized"))
        for name in ("activation", "weight"):
            if not isinstance(getattr(self, name), Quantizer | None):
                raise TypeError(f"{name} must be a Quantizer or None, got {getattr(self, name)!r}")
        if (self.activation is None) != (self.weight is None):
            raise ValueError(
                "a recipe quantises both operands or neither, got "
                f"activation={self.activation!r} and weight={self.weight!r}"
            )
        if self.activation is None and self.backward != "original":
            raise ValueError(
                f"backward must be 'original' where nothing is quantised, got {self.backward!r}"
            )


NVFP4 = Recipe()
UNQUANTIZED = Recipe(activation=None, weight=None)


@dataclasses.dataclass(frozen=True)
class Rule:
    """Layers whose name matches `glob` (shell style; `*` also matches dots) get `recipe`."""

    glob: str
    recipe: Recipe

    def __post_init__(self):
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"recipe must be a Recipe, got {self.recipe!r} for {self.glob!r}")


@dataclasses.dataclass(frozen=True)
class Policy:
    """Ordered rules; the first that matches a layer's name decides."""

    rules: tuple[Rule, ...] = ()

    def __init__(self, rules: Iterable[Rule] = ()):
        object.__setattr__(self, "rules", tuple(rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"rules must be Rule objects, got {rule!r}")

    def _first_match(self, name: str) -> int | None:
        """The index of the rule that decides for `name`."""
        matches = (i for i, rule in enumerate(self.rules) if fnmatch.fnmatchcase(name, rule.glob))
        return next(matches, None)

    def recipe_for(self, name: str) -> Recipe:
        """The recipe of the layer called `name`; UNQUANTIZED where no rule matches."""
        match = self._first_match(name)
        return UNQUANTIZED if match is None else self.rules[match].recipe

    def check_used(self, names: Iterable[str]) -> None:
        """Raises ValueError if a rule decides for none of the layers `names`."""
        names = list(names)
        used = {self._first_match(name) for name in names}
        for index, rule in enumerate(self.rules):
            if index not in used:
                examples = ", ".join(sorted(names)[:4])
                raise ValueError(
                    f"rule {rule.glob!r} decides for no layer: it matches none of {examples}, ... "
                    "or an earlier rule takes all that it matches"
                )


def all_linears(recipe: Recipe = NVFP4) -> Policy:
    """Every linear layer of every block; embedding, router and head are never quantised."""
    return Policy([Rule("layers.*", recipe)])


def experts_only(recipe: Recipe = NVFP4) -> Policy:
    """The expert products of mixture-of-experts blocks alone."""
    return Policy([Rule("layers.*.mlp.experts.*", recipe)])


def last_layers_unquantized(
    num_layers: int, fraction: float = 0.15, recipe: Recipe = NVFP4
) -> Policy:
    """All linear layers but those of the last `fraction` of `num_layers` blocks (rounded up)."""
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
    first = num_layers - math.ceil(round(num_layers * fraction, 9))
    rules = [Rule(f"layers.{layer}.*", UNQUANTIZED) for layer in range(first, num_layers)]
    return Policy([*rules, Rule("layers.*", recipe)] if first > 0 else rules)


def none() -> Policy:
    """Nothing is quantised."""
    return Policy()
