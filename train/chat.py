"""Chat templates: from the turns of a conversation to the text that a model was trained on.

The template is the Jinja text that comes with a Hugging Face tokenizer, rendered in the same
environment as there: sandboxed and immutable (a template is somebody else's program), blocks
trimmed, `tojson` without HTML escapes, `raise_exception` for the template's own complaints.
"""

import json
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from train.data import Message


class ChatTemplate:
    """One compiled template.

    Args:
      source: the Jinja text.
      name: where it is from, for error messages.
    """

    def __init__(self, source: str, name: str = "chat template"):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._name = name
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"{name}: not a Jinja template: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path | str) -> "ChatTemplate":
        """From chat_template.jinja, or else from the `chat_template` in tokenizer_config.json."""
        folder = Path(folder)
        alone = folder / "chat_template.jinja"
        if alone.is_file():
            return cls(alone.read_text(encoding="utf-8"), str(alone))
        config = folder / "tokenizer_config.json"
        if not config.is_file():
            raise FileNotFoundError(f"neither {alone.name} nor {config.name} in {folder}")
        try:
            source = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{config}: not a JSON object: {error}") from error
        if not isinstance(source, str):
            raise ValueError(f"{config}: 'chat_template' has to be text, got {source!r:.80}")
        return cls(source, str(config))

    def render(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool = True,
        enable_thinking: bool = True,
    ) -> str:
        """The conversation as text.

        Args:
          messages: turns with "role" and "content".
          add_generation_prompt: end with the start of the assistant's turn.
          enable_thinking: False lets the assistant's turn start with an empty thought; a template
            without that option ignores it.

        Raises:
          ValueError: no turns, a turn without role or content, or the template refuses them.
        """
        if not messages:
            raise ValueError("the conversation has no turns")
        for index, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise ValueError(f"turn {index} has no text in {key!r}: {message!r:.80}")
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
            )
        except TemplateError as error:
            raise ValueError(f"{self._name} refuses the conversation: {error}") from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
