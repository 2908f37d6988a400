"""From text to token ids and back: characters for tiny policies, Hugging Face files for Qwen3.

`decode` hides nothing. A padding, stop or unknown token inside a completion shows in its text,
because a reward that compares text would otherwise take "1<pad>9" for "19". The one token that is
taken off is the stop token that ended a completion, by `decode_completion`.

Which tokens are real is never read off the ids: Qwen3's padding token is one of its stop tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as TokenizersTokenizer

from train.chat import ChatTemplate
from train.data import Message

_UNKNOWN = "\ufffd"


class Tokenizer(Protocol):
    """What sampler and learner need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 <= id < vocab_size; a model's vocabulary has to be at least as large."""
        ...

    @property
    def pad_id(self) -> int:
        """What padding slots are filled with; never looked for."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Sampling one of these ends the completion."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, prompt: str | list[Message]) -> list[int]:
        """The ids that a completion is sampled after."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids, also of ones past vocab_size, without leaving any out."""
        ...


def decode_completion(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of a completion as rewards take it: without the stop token that ended it."""
    ids = list(ids)
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in tokenizer.stop_ids else ids)


@dataclass(frozen=True)
class CharTokenizer:
    """One id for each character of `alphabet`, after padding (0) and stop (1)."""

    alphabet: str

    pad_id = 0
    stop_ids = (1,)
    # How padding and stop show in text; neither can be written in a prompt.
    _special = "\u2400\u2403"

    def __post_init__(self) -> None:
        if not self.alphabet:
            raise ValueError("alphabet is empty")
        if len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError(f"alphabet holds a character twice: {self.alphabet!r}")
        if set(self.alphabet) & set(self._special + _UNKNOWN):
            raise ValueError(f"alphabet holds one of the marks {self._special + _UNKNOWN!r}")

    @property
    def vocab_size(self) -> int:
        return len(self._special) + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for a character that is not in the alphabet."""
        ids = [self.alphabet.find(char) for char in text]
        if -1 in ids:
            raise ValueError(
                f"character {text[ids.index(-1)]!r} of {text!r} is not in the alphabet "
                f"{self.alphabet!r}"
            )
        return [len(self._special) + i for i in ids]

    def encode_prompt(self, prompt: str | list[Message]) -> list[int]:
        """The characters of a prompt; there is no chat template, so it has to be text."""
        if not isinstance(prompt, str):
            raise ValueError("a character tokenizer has no chat template; the prompt must be text")
        return self.encode(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Padding shows as U+2400, stop as U+2403, an id past the vocabulary as U+FFFD."""
        marks = self._special + self.alphabet
        return "".join(marks[i] if 0 <= i < len(marks) else _UNKNOWN for i in ids)


class HfTokenizer:
    """A tokenizer.json of Hugging Face with the chat template that lies beside it.

    Args:
      folder: holds tokenizer.json, and tokenizer_config.json with a chat template.
      stop_tokens: the tokens that end a completion; the default is what Qwen3's
        generation_config.json lists (ids 151645 and 151643).
      pad_token: what padding is filled with; the default is Qwen3's (151643).
      enable_thinking: as in Qwen3's template; False starts each answer with an empty thought.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file cannot be read, or a token is not in the vocabulary.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        stop_tokens: Sequence[str] = ("<|im_end|>", "<|endoftext|>"),
        pad_token: str = "<|endoftext|>",
        enable_thinking: bool = True,
    ):
        if not stop_tokens:
            raise ValueError("stop_tokens is empty: no completion could ever end")
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {folder}")
        try:
            self._tokenizer = TokenizersTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        # Settings of a data pipeline that may have been saved with the file.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._enable_thinking = enable_thinking
        self._template = ChatTemplate.from_folder(folder)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.stop_ids = tuple(self._id(token, "stop_tokens") for token in stop_tokens)
        self.pad_id = self._id(pad_token, "pad_token")
        self._unknown_ids = self.encode(_UNKNOWN)

    def encode(self, text: str) -> list[int]:
        """Special tokens written in the text become those tokens, as in a rendered template."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error}") from None
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, prompt: str | list[Message]) -> list[int]:
        """A conversation through the chat template, ready for the answer; text is one user turn."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return self.encode(self._template.render(messages, enable_thinking=self._enable_thinking))

    def decode(self, ids: Sequence[int]) -> str:
        """Ids of the model's vocabulary that have no token show as U+FFFD."""
        # The library drops such ids in silence; a model's head is often padded past its tokens.
        known = [j for i in ids for j in ([i] if 0 <= i < self.vocab_size else self._unknown_ids)]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def _id(self, token: str, argument: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"{argument}: {token!r} is not a token of this tokenizer")
        return token_id
