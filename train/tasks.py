"""Procedural tasks: problems made from a seed, without a file.

* `Arithmetic`: sums of two numbers as short strings, "12+7=" -> "19", for a character tokenizer.
  Small enough for a tiny policy on a CPU, and no problem is in two of its sets.
* `reasoning_gym_task`: the tasks of the reasoning-gym library in words, for a real policy.

Rewards here are exact matches (`rewards.exact_match`, `rewards.tagged_match`). reasoning-gym's own
scores are not used: for many of its tasks they give a wrong answer something above zero (0.01 for
any text, up to 1.0 for a guess), which group advantages blow up into a learning signal, and some
raise on text that is not an answer at all.
"""

from dataclasses import dataclass

from train.data import Example, shuffled

ARITHMETIC_ALPHABET = "0123456789+="
"""Every character that `Arithmetic` writes."""


@dataclass(frozen=True)
class TaskSets:
    """Three sets of examples that share no problem.

    Attributes:
      supervised: to teach the format with, before reinforcement learning.
      train: what reinforcement learning samples from.
      heldout: to measure with; never trained on.
    """

    supervised: list[Example]
    train: list[Example]
    heldout: list[Example]


@dataclass(frozen=True)
class Arithmetic:
    """Sums a + b of two whole numbers, written "a+b=" and answered by the digits of the sum.

    a + b and b + a are one problem: all pairs {a, b} are shuffled with `seed` and cut into three
    sets, so the sets are disjoint by construction; a set then holds both orders of its pairs.

    Attributes:
      low, high: the operands' range, both ends included; 0 <= low <= high.
      width: digits that operands are padded to with leading zeros (0: none), and the answer to
        width + 1; every problem then has the same length.
      reverse_answer: the answer's digits from the last to the first, which lets the carry be
        found in the order in which it is needed.
      supervised: share of the pairs that goes to the supervised set.
      heldout: share of the pairs that is held out; the rest is the train set.
      seed: decides which pair is in which set.
    """

    low: int = 0
    high: int = 99
    width: int = 0
    reverse_answer: bool = False
    supervised: float = 0.4
    heldout: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"0 <= low <= high is needed, got low={self.low}, high={self.high}")
        if self.width and self.width < len(str(self.high)):
            raise ValueError(
                f"width={self.width} is too small for high={self.high}; use 0 (no padding) or at "
                f"least {len(str(self.high))}"
            )
        if not (self.supervised >= 0 and self.heldout > 0 and self.supervised + self.heldout < 1):
            raise ValueError(
                "supervised >= 0, heldout > 0 and supervised + heldout < 1 are needed, got "
                f"supervised={self.supervised}, heldout={self.heldout}"
            )
        if self.pairs < 10:
            raise ValueError(
                f"the range {self.low}..{self.high} holds only {self.pairs} pairs; at least 10 "
                "are needed for three sets"
            )

    @property
    def pairs(self) -> int:
        """Number of unordered pairs of operands."""
        count = self.high - self.low + 1
        return count * (count + 1) // 2

    @property
    def max_prompt_length(self) -> int:
        """Characters of the longest prompt."""
        return len(self._prompt(self.high, self.high))

    @property
    def max_answer_length(self) -> int:
        """Characters of the longest answer."""
        return len(self.answer(self.high, self.high))

    def answer(self, a: int, b: int) -> str:
        """The answer to "a+b=" in the task's format."""
        digits = str(a + b)
        if self.width:
            digits = digits.zfill(self.width + 1)
        return digits[::-1] if self.reverse_answer else digits

    def sets(self) -> TaskSets:
        """All problems of the range, in an order that depends on the seed alone."""
        numbers = range(self.low, self.high + 1)
        pairs = [(a, b) for a in numbers for b in numbers if a <= b]
        pairs = [pairs[i] for i in shuffled(len(pairs), self.seed)]
        heldout = max(1, round(self.heldout * len(pairs)))
        supervised = round(self.supervised * len(pairs))
        return TaskSets(
            supervised=self._examples(pairs[heldout : heldout + supervised]),
            train=self._examples(pairs[heldout + supervised :]),
            heldout=self._examples(pairs[:heldout]),
        )

    def _examples(self, pairs: list[tuple[int, int]]) -> list[Example]:
        ordered = [p for a, b in pairs for p in ([(a, b), (b, a)] if a != b else [(a, b)])]
        return [Example(self._prompt(a, b), self.answer(a, b)) for a, b in ordered]

    def _prompt(self, a: int, b: int) -> str:
        return f"{a:0{self.width}d}+{b:0{self.width}d}=" if self.width else f"{a}+{b}="


TAG_INSTRUCTION = "Write the final answer alone between <answer> and </answer>."


def reasoning_gym_task(
    name: str, *, train: int, heldout: int, seed: int, **options: object
) -> TaskSets:
    """Problems of one reasoning-gym task; equal arguments give equal problems.

    A problem that the generator repeats is kept once, so the sets may be a little smaller than
    asked and share no prompt. Only tasks with one right answer in text are of use with an exact
    match: a task whose answers are missing is refused; one that has several right answers
    (puzzles such as `countdown`) rewards the generator's own answer alone.

    Args:
      name: a name in `reasoning_gym.factory.DATASETS`, such as "chain_sum".
      train, heldout: number of problems made for either set, at least 1.
      seed: of the generator.
      options: of the task itself, such as max_terms=3.

    Raises:
      ValueError: no such task or option, or a task without answers.
    """
    # Imported here: it takes seconds, and only runs on this kind of task need it.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ValueError(
            f"no reasoning-gym task {name!r}; there are: {', '.join(sorted(DATASETS))}"
        )
    if train < 1 or heldout < 1:
        raise ValueError(f"train and heldout have to be at least 1, got {train} and {heldout}")
    try:
        problems = reasoning_gym.create_dataset(name, size=train + heldout, seed=seed, **options)
    except (TypeError, AssertionError) as error:
        raise ValueError(f"reasoning-gym task {name!r} refuses {options}: {error}") from error
    examples: dict[str, Example] = {}
    for index, problem in enumerate(problems):
        answer = problem["answer"]
        if not isinstance(answer, str) or not answer.strip():
            raise ValueError(
                f"reasoning-gym task {name!r} has no answer in text for problem {index} "
                f"({answer!r}), so an exact match cannot grade it"
            )
        prompt = f"{problem['question']}\n{TAG_INSTRUCTION}"
        examples.setdefault(prompt, Example(prompt, answer.strip(), {"task": name, "index": index}))
    unique = list(examples.values())
    if len(unique) <= heldout:
        raise ValueError(
            f"reasoning-gym task {name!r} makes only {len(unique)} different problems here, "
            f"not more than heldout={heldout}"
        )
    return TaskSets(supervised=[], train=unique[heldout:], heldout=unique[:heldout])
