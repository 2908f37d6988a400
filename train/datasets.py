"""Adapters: one function for each kind of data file, from a row of JSON to an `Example`.

The fields are those of the published files:

  gsm8k         question, answer (worked text that ends in "#### N")
  svamp         Body, Question, Answer (a number)
  dapo          prompt (turns of a conversation), reward_model.ground_truth, extra_info.index
  math          problem, and answer or, without it, solution with a \\boxed answer
  olympiadbench question, context, final_answer (a list), error (a tolerance) or null
  ifeval        prompt, instruction_id_list, kwargs (one object for each instruction)

Prompts of the mathematical sets get the instruction that Qwen's own evaluation uses; DAPO's
prompts carry their own. The answer is what `math_grader` compares with.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from train.data import DataError, Example, Row, read_jsonl

BOXED_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def gsm8k(row: Row) -> Example:
    """Grade-school mathematics (openai/grade-school-math); the answer follows "####"."""
    _, mark, answer = row.text("answer").rpartition("####")
    answer = answer.replace(",", "").strip()
    if not mark or not re.fullmatch(r"-?\d+(\.\d+)?", answer):
        raise DataError(f"field 'answer' has to end in '#### ' and a number, got {answer!r}")
    return Example(_boxed(row.text("question")), answer)


def svamp(row: Row) -> Example:
    """Word problems of one step (arkilpatel/SVAMP); answers are numbers such as 145.0."""
    answer = float(row.value("Answer", (int, float)))
    if not math.isfinite(answer):
        raise DataError(f"field 'Answer' has to be finite, got {answer}")
    text = str(int(answer)) if answer.is_integer() else repr(answer)
    body = row.text("Body").strip()
    # Some bodies end without a full stop and the question follows in the same paragraph.
    body += "" if body.endswith((".", "?", "!", ",")) else "."
    return Example(_boxed(f"{body} {row.text('Question').strip()}"), text)


def dapo(row: Row) -> Example:
    """DAPO-Math-17k (BytedTsinghua-SIA): the prompt is a conversation and is kept as it is."""
    prompt = [
        {"role": turn.text("role"), "content": turn.text("content")}
        for turn in row.objects("prompt")
    ]
    if not prompt:
        raise DataError("field 'prompt' is an empty list")
    meta = {}
    if row.has("extra_info") and row.object("extra_info").has("index"):
        meta["index"] = row.object("extra_info").value("index", (str, int))
    return Example(prompt, row.object("reward_model").text("ground_truth").strip(), meta)


def math_problem(row: Row) -> Example:
    """MATH (hendrycks) and files in its style: `answer`, or the last \\boxed of `solution`."""
    if row.has("answer"):
        answer = row.text("answer").strip()
    else:
        answer = last_boxed(row.text("solution"))
        if answer is None:
            raise DataError("field 'solution' holds no \\boxed answer, and there is no 'answer'")
    return Example(_boxed(row.text("problem")), answer)


def olympiadbench(row: Row) -> Example:
    """OlympiadBench, open-ended text problems; several answers are one list.

    `error` is the absolute tolerance of a numerical answer, in `meta["tolerance"]`.
    """
    answer = ", ".join(text.replace("$", "").strip() for text in row.texts("final_answer"))
    meta = {}
    if row.has("error"):
        meta["tolerance"] = _tolerance(row.value("error", (str, int, float)))
    question = row.text("question")
    if row.has("context"):
        question = f"{row.text('context')}\n{question}"
    return Example(_boxed(question), answer, meta)


def ifeval(row: Row) -> Example:
    """IFEval (google-research): instructions that a program can check; there is no answer."""
    instructions = row.texts("instruction_id_list")
    arguments = row.value("kwargs", list)
    if len(arguments) != len(instructions) or not all(isinstance(a, dict) for a in arguments):
        raise DataError(
            f"field 'kwargs' has to hold one object for each of the {len(instructions)} "
            f"instructions, got {len(arguments)} values"
        )
    given = [{k: v for k, v in a.items() if v is not None} for a in arguments]
    meta = {"instructions": instructions, "arguments": given}
    return Example(row.text("prompt"), "", meta)


@dataclass(frozen=True)
class Dataset:
    """A kind of data file.

    Attributes:
      adapter: turns a row into an example.
      reward: the name of the reward that grades it, for `rewards.open_reward`.
      has_repeats: the published file holds every problem many times (DAPO-Math-17k: about a
        hundred); each is kept once, or one epoch would be a hundred.
    """

    adapter: Callable[[Row], Example]
    reward: str
    has_repeats: bool = False

    def read(self, path: Path | str) -> list[Example]:
        """The examples of the JSONL file `path`."""
        return read_jsonl(path, self.adapter, unique=self.has_repeats)


DATASETS = {
    "gsm8k": Dataset(gsm8k, "math"),
    "svamp": Dataset(svamp, "math"),
    "dapo": Dataset(dapo, "math", has_repeats=True),
    "math": Dataset(math_problem, "math"),
    "olympiadbench": Dataset(olympiadbench, "math"),
    "ifeval": Dataset(ifeval, "ifeval"),
}


def read_dataset(kind: str, path: Path | str) -> list[Example]:
    """Reads `path`, a JSONL file of one of the kinds in DATASETS; raises DataError."""
    if kind not in DATASETS:
        raise ValueError(f"kind has to be one of {', '.join(DATASETS)}, got {kind!r}")
    return DATASETS[kind].read(path)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces balance, or None."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{", text))):
        depth = 1
        for end in range(match.end(), len(text)):
            if text[end] in "{}" and text[end - 1] != "\\":
                depth += 1 if text[end] == "{" else -1
            if depth == 0:
                return text[match.end() : end].strip()
    return None


def _boxed(question: str) -> str:
    return f"{question.strip()}\n{BOXED_INSTRUCTION}"


def _tolerance(value: str | int | float) -> float:
    try:
        tolerance = float(value)
    except ValueError:
        tolerance = math.nan
    if not 0 <= tolerance < math.inf:
        raise DataError(f"field 'error' has to be one number, 0 or more, got {value!r}")
    return tolerance
