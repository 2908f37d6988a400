"""Rewards: from the text of completions to numbers.

A reward is a function `reward(examples, responses) -> list[float]`, one number for each pair.
`open_reward` opens one by its name:

  exact_match   the response is the answer, character by character
  tagged_match  so is what stands in the last <answer>...</answer>
  boxed         the final answer stands in exactly one \\boxed{...}, whatever it is (format alone)
  math          the final answer equals the reference as mathematics (math-verify)
  ifeval        the response follows all instructions of its prompt
  package.module:function   your own

Responses come without the stop token that ended them. `math` and `ifeval` run in a pool of
processes (`grading.py`) that lives as long as the reward is open; a response that hangs, is too
long or breaks its grader scores 0 and is counted in `counts`.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from train.data import Example
from train.grading import GraderPool

RewardFunction = Callable[[Sequence[Example], Sequence[str]], Sequence[float]]


def exact_match(examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
    """1.0 where the response is exactly the answer, else 0.0."""
    return [float(r == e.answer) for e, r in zip(examples, responses, strict=True)]


def tagged_match(examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
    """1.0 where the last <answer>...</answer> holds exactly the answer, space around it aside."""
    return [
        float(_after_last(r, "<answer>", "</answer>") == e.answer)
        for e, r in zip(examples, responses, strict=True)
    ]


def boxed(examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
    """1.0 where the text after the thought holds exactly one, not empty \\boxed{...}, else 0.0."""
    del examples
    pattern = re.compile(r"\\boxed\s*\{(?=\s*[^\s}])")
    finals = [r.rpartition("</think>")[2] for r in responses]
    return [float(len(pattern.findall(f)) == 1 == f.count("\\boxed")) for f in finals]


class OpenReward:
    """A reward that is ready for use: what `open_reward` yields.

    Calling it checks the function's result: as many numbers as responses, all finite.
    """

    def __init__(self, name: str, function: RewardFunction, pool: GraderPool | None = None):
        self.name = name
        self._function = function
        self._pool = pool

    @property
    def counts(self) -> dict[str, int]:
        """How gradings ended so far (`grading.OUTCOMES`); empty for rewards without a pool."""
        return self._pool.counts if self._pool else {}

    def __call__(self, examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
        """One reward for each response.

        Raises:
          ValueError: the lengths differ, or the function's result is not one finite number for
            each response.
        """
        if len(examples) != len(responses):
            raise ValueError(f"{len(examples)} examples with {len(responses)} responses")
        result = self._function(examples, responses)
        try:
            rewards = np.asarray(result)
        except ValueError as error:
            raise ValueError(f"reward {self.name!r} returned no list of numbers: {error}") from None
        if rewards.shape != (len(responses),) or rewards.dtype.kind not in "biuf":
            raise ValueError(
                f"reward {self.name!r} has to return {len(responses)} numbers, got an array of "
                f"shape {rewards.shape} and dtype {rewards.dtype}"
            )
        bad = np.flatnonzero(~np.isfinite(rewards))
        if bad.size:
            raise ValueError(
                f"reward {self.name!r} returned {rewards[bad[0]]} for response {bad[0]} "
                f"({responses[bad[0]]!r:.80}); rewards have to be finite"
            )
        return [float(r) for r in rewards]


@contextmanager
def open_reward(name: str, *, workers: int = 2, time_limit_s: float = 5.0) -> Iterator[OpenReward]:
    """Opens the reward `name` (see the module's text); its processes end with the context.

    Args:
      name: one of the built-in names, or the dotted path of a function.
      workers, time_limit_s: of the pool of `math` and `ifeval`.

    Raises:
      ValueError: no such reward, or the dotted path leads nowhere.
      RuntimeError: a grader's library is not installed.
    """
    if name in _POOLED:
        grader, arguments = _POOLED[name]
        with GraderPool(grader, workers=workers, time_limit_s=time_limit_s) as pool:

            def graded(examples: Sequence[Example], responses: Sequence[str]) -> list[float]:
                pairs = zip(examples, responses, strict=True)
                return pool.grade([(r, *arguments(e)) for e, r in pairs])

            yield OpenReward(name, graded, pool)
    elif name in _PLAIN:
        yield OpenReward(name, _PLAIN[name])
    else:
        yield OpenReward(name, _imported(name))


def soft_overlong_penalty(
    lengths: np.ndarray | Sequence[int], *, max_length: int, buffer: int
) -> np.ndarray:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), to be added to the reward.

    0 up to max_length - buffer tokens, then falling by 1/buffer a token to -1 at max_length, and
    -1 above it.

    Args:
      lengths: i32[...], tokens of each completion.
      max_length: completions may have this many tokens.
      buffer: 1 <= buffer <= max_length.

    Returns:
      f32[...], between -1 and 0.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"1 <= buffer <= max_length is needed, got buffer={buffer}, max_length={max_length}"
        )
    over = np.asarray(lengths) - (max_length - buffer)
    return -np.clip(over / buffer, 0.0, 1.0).astype(np.float32)


def _math_arguments(example: Example) -> tuple[str, float | None]:
    return example.answer, example.meta.get("tolerance")


def _ifeval_arguments(example: Example) -> tuple[Any, list[str], list[dict]]:
    return example.prompt, example.meta["instructions"], example.meta["arguments"]


_PLAIN: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "tagged_match": tagged_match,
    "boxed": boxed,
}
_POOLED: dict[str, tuple[str, Callable[[Example], tuple]]] = {
    "math": ("train.math_grader:grade", _math_arguments),
    "ifeval": ("train.ifeval_grader:grade", _ifeval_arguments),
}
BUILT_IN = (*_PLAIN, *_POOLED)
"""The names that `open_reward` knows."""


def _imported(path: str) -> RewardFunction:
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(
            f"reward has to be one of {', '.join(BUILT_IN)} or 'package.module:function', "
            f"got {path!r}"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(
            f"reward {path!r}: module {module_name!r} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    functions: dict[str, Any] = {
        n: v for n, v in vars(module).items() if callable(v) and not n.startswith("_")
    }
    if function_name not in functions:
        raise ValueError(
            f"reward {path!r}: module {module_name!r} has no function {function_name!r}; it has "
            f"{', '.join(sorted(functions)) or 'none'}"
        )
    return functions[function_name]


def _after_last(text: str, start: str, end: str) -> str | None:
    """What stands between the last `start` and the `end` that follows it, or None."""
    _, found, rest = text.rpartition(start)
    inside, closed, _ = rest.partition(end)
    return inside.strip() if found and closed else None
