"""Checks of a recipe's values; messages name the option, its value and what is legal."""

from typing import Any, get_args


def check(option: str, value: object, legal: bool, rule: str) -> None:
    """Raises ValueError unless `legal`; `rule` says what is."""
    if not legal:
        raise ValueError(f"{option}={value!r}: must be {rule}")


def check_choice(option: str, value: object, choices: Any) -> None:
    """Raises ValueError unless `value` is one of those of `choices`, a Literal type."""
    legal = get_args(choices)
    check(option, value, value in legal, f"one of {', '.join(map(repr, legal))}")
