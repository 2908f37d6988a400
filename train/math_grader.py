"""The grader of mathematical answers: math-verify, for the workers of `GraderPool`.

What counts is the text after the last "</think>": the last \\boxed answer there, or without one
what follows words like "the answer is", or the last number. It is compared as mathematics: 1/2 is
0.5, sets have no order, 0.333 is not 1/3. There is no time limit here; the pool has one.
"""

from math_verify import parse, verify


def grade(response: str, answer: str, tolerance: float | None = None) -> float:
    """1.0 if the response's final answer equals `answer`, else 0.0.

    Args:
      response: a model's text.
      answer: the reference, in LaTeX without dollar signs or \\boxed, or plain.
      tolerance: the largest absolute difference that still counts, for answers that are numbers.
    """
    final = response.rpartition("</think>")[2]
    expected = parse(f"\\boxed{{{answer}}}", parsing_timeout=0)
    given = parse(final, parsing_timeout=0)
    if verify(expected, given, timeout_seconds=0):
        return 1.0
    if tolerance is not None and _close(expected, given, tolerance):
        return 1.0
    return 0.0


def _close(expected: list, given: list, tolerance: float) -> bool:
    # parse gives the expression and then its text.
    if not expected or not given or isinstance(expected[0], str) or isinstance(given[0], str):
        return False
    try:
        return abs(float(expected[0]) - float(given[0])) <= tolerance
    except (TypeError, ValueError, OverflowError):  # not a real number
        return False
