"""The problems of a run, encoded once: which tokenizer, which prompts, which reward."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.config import Run
from train.data import Example
from train.datasets import DATASETS, read_dataset
from train.rollout import Rollout, left_pad
from train.tasks import ARITHMETIC_ALPHABET, reasoning_gym_task
from train.tokenizer import CharTokenizer, HfTokenizer, Tokenizer, decode_completion


@dataclass(frozen=True)
class Problem:
    """An example and the tokens of its prompt."""

    example: Example
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Problems:
    """What a run asks.

    Attributes:
      tokenizer: of its prompts and completions.
      reward: a name for `rewards.open_reward`.
      slots: P, to which prompts are padded: the longest one.
      supervised, train, heldout: sets that share no problem; the first and the last may be empty.
      too_long: prompts that were left out.
    """

    tokenizer: Tokenizer
    reward: str
    slots: int
    supervised: list[Problem]
    train: list[Problem]
    heldout: list[Problem]
    too_long: int

    def prompts(self, problems: Sequence[Problem]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens i32[B, P], padded on the left, and their start i32[B]."""
        return left_pad([p.prompt for p in problems], self.slots, self.tokenizer.pad_id)

    def responses(self, rollout: Rollout) -> list[str]:
        """The text of each completion, as rewards take it."""
        return [decode_completion(self.tokenizer, ids) for ids in rollout.completions()]


def load_problems(run: Run) -> Problems:
    """Makes or reads the problems of a run.

    Raises:
      ValueError: a file or tokenizer cannot be used, no prompt is short enough, or there are
        fewer problems than a rollout asks.
      FileNotFoundError: a file is missing.
    """
    data = run.data
    if data.arithmetic is not None:
        made = data.arithmetic.sets()
        supervised, train, heldout = made.supervised, made.train, made.heldout
        tokenizer: Tokenizer = CharTokenizer(ARITHMETIC_ALPHABET)
        reward = "exact_match"
    else:
        folder = data.tokenizer or run.model.checkpoint
        if folder is None:
            raise ValueError("data.tokenizer is needed; see Run.check_inputs")
        tokenizer = HfTokenizer(folder)
        supervised, heldout = [], []
        if data.task is not None:
            made = reasoning_gym_task(
                data.task,
                train=data.task_problems,
                heldout=run.evaluation.prompts,
                seed=run.seed,
            )
            train, heldout, reward = made.train, made.heldout, "tagged_match"
        elif data.path is None:
            raise ValueError("data.path is needed; see Run.check_inputs")
        else:
            train = read_dataset(data.kind, data.path)
            if data.heldout is not None:
                heldout = read_dataset(data.kind, data.heldout)
            reward = DATASETS[data.kind].reward

    too_long = 0

    def encoded(examples: Sequence[Example]) -> list[Problem]:
        nonlocal too_long
        all_ = [Problem(e, tuple(tokenizer.encode_prompt(e.prompt))) for e in examples]
        short = [p for p in all_ if len(p.prompt) <= data.prompt_slots]
        too_long += len(all_) - len(short)
        return short

    sets = [encoded(s) for s in (supervised, train, heldout[: run.evaluation.prompts])]
    if len(sets[1]) < run.grpo.prompts:
        raise ValueError(
            f"grpo.prompts={run.grpo.prompts}: only {len(sets[1])} training problems have "
            f"at most data.prompt-slots={data.prompt_slots} tokens"
        )
    if run.supervised is not None and len(sets[0]) < run.supervised.batch:
        raise ValueError(
            f"supervised.batch={run.supervised.batch}: must be at most {len(sets[0])}, the number "
            "of supervised problems"
        )
    return Problems(
        tokenizer=tokenizer,
        reward=data.reward or reward,
        slots=max(len(problem.prompt) for problems in sets for problem in problems),
        supervised=sets[0],
        train=sets[1],
        heldout=sets[2],
        too_long=too_long,
    )
