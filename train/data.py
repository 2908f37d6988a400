"""Examples, JSONL files of them, and the cursor that walks through them.

An `Example` is one prompt with what its reward needs. `read_jsonl` turns a file into examples
with one of the adapters of `datasets.py`; a bad line stops the run with the file, the line and the
field. `PromptCursor` decides which example comes next, and its whole state is a small dict, so a
resumed run continues with exactly the example that the unbroken run would have taken.

Left out: files larger than memory, and mixing several files by weight.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Message = dict[str, str]
"""One turn of a conversation: {"role": "system" | "user" | "assistant", "content": text}."""


@dataclass(frozen=True)
class Example:
    """One prompt and what its reward needs.

    Attributes:
      prompt: text, or the turns of a conversation; a tokenizer's `encode_prompt` takes both.
      answer: the reference answer as its reward compares it ("" where there is none).
      meta: JSON-able extras: what a grader needs beyond the answer, and where the row came from.
    """

    prompt: str | list[Message]
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


class DataError(ValueError):
    """A data file that cannot be used; the message names file, line and field."""


class Row:
    """A JSON object whose fields are asked for by name and type.

    Adapters read a line through this class, so that every complaint names the field. Nested
    objects are rows too: `row.object("reward_model").text("ground_truth")`.
    """

    def __init__(self, values: dict[str, Any], prefix: str = ""):
        self._values = values
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def value(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """The field `name`, which has to be of the type `kind`; raises DataError."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        wanted = " or ".join(k.__name__ for k in kinds)
        if name not in self._values:
            present = ", ".join(sorted(self._values)) or "none"
            raise DataError(
                f"field '{self._prefix}{name}' ({wanted}) is missing; fields here: {present}"
            )
        value = self._values[name]
        # bool is an int to Python and never a number to a data set.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise DataError(
                f"field '{self._prefix}{name}' has to be {wanted}, got {type(value).__name__}: "
                f"{_shortened(value)}"
            )
        return value

    def text(self, name: str, *, empty: bool = False) -> str:
        """The string field `name`, valid Unicode and, unless `empty`, not blank."""
        value = self.value(name, str)
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(f"field '{self._prefix}{name}' is not valid Unicode: {error}") from None
        if not empty and not value.strip():
            raise DataError(f"field '{self._prefix}{name}' is empty")
        return value

    def object(self, name: str) -> "Row":
        """The object field `name`."""
        return Row(self.value(name, dict), f"{self._prefix}{name}.")

    def objects(self, name: str) -> list["Row"]:
        """The field `name`, a list of objects."""
        rows = []
        for index, value in enumerate(self.value(name, list)):
            label = f"{self._prefix}{name}[{index}]"
            if not isinstance(value, dict):
                raise DataError(f"field '{label}' has to be dict, got {_shortened(value)}")
            rows.append(Row(value, f"{label}."))
        return rows

    def texts(self, name: str) -> list[str]:
        """The field `name`, a list of at least one string."""
        values = self.value(name, list)
        if not values:
            raise DataError(f"field '{self._prefix}{name}' is an empty list")
        items = Row({f"{name}[{i}]": value for i, value in enumerate(values)}, prefix=self._prefix)
        return [items.text(f"{name}[{i}]") for i in range(len(values))]


def read_jsonl(
    path: Path | str, adapter: Callable[[Row], Example], *, unique: bool = False
) -> list[Example]:
    """Reads one example a line; blank lines are skipped.

    Args:
      path: a file of JSON objects, one a line, in UTF-8.
      adapter: turns a row into an example; one of `datasets.py`.
      unique: keep the first of several examples with equal prompt and answer.

    Raises:
      DataError: a line is not a JSON object or its fields are not what the adapter needs, or the
        file holds no example. The message starts with `path:line`.
      FileNotFoundError: there is no such file.
    """
    path = Path(path)
    examples: list[Example] = []
    seen = set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line.decode("utf-8"))
                if not isinstance(values, dict):
                    raise DataError(f"expected a JSON object, got {_shortened(values)}")
                example = adapter(Row(values))
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}") from None
            except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, too deep
                raise DataError(f"{path}:{number}: not valid JSON: {error}") from None
            if unique:
                key = json.dumps([example.prompt, example.answer])
                if key in seen:
                    continue
                seen.add(key)
            examples.append(example)
    if not examples:
        raise DataError(f"{path}: no examples in this file")
    return examples


class PromptCursor:
    """Which examples come next: endless epochs over `size` examples, each a new shuffle.

    Epoch e visits the examples in an order that depends on (seed, e, size) alone. `take(count)`
    always returns `count` indices: a batch that reaches the end of an epoch continues at the start
    of the next one, so no example is lost or repeated within an epoch and every batch has the same
    size (a smaller last batch would be another compiled program).

    The order comes from the raw 64-bit output of NumPy's PCG64, which NumPy keeps stable over
    versions (its `shuffle` and `permutation` are not promised to be).

    Args:
      size: number of examples, at least 1.
      seed: a non-negative integer.
    """

    def __init__(self, size: int, seed: int):
        if size < 1:
            raise ValueError(f"size has to be at least 1, got {size}")
        if seed < 0:
            raise ValueError(f"seed has to be 0 or more, got {seed}")
        self._size = size
        self._seed = seed
        self._start_epoch(0)

    def take(self, count: int) -> list[int]:
        """The next `count` indices, 1 <= count <= size."""
        if not 1 <= count <= self._size:
            raise ValueError(
                f"count has to be between 1 and the number of examples, {self._size}, got {count}"
            )
        taken = self._order[self._position : self._position + count]
        self._position += len(taken)
        if self._position == self._size:
            self._start_epoch(self._epoch + 1)
            rest = count - len(taken)
            taken = np.concatenate([taken, self._order[:rest]])
            self._position = rest
        return taken.tolist()

    def state(self) -> dict[str, int]:
        """What `restore` needs: a dict of four integers, ready for JSON."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "size": self._size,
            "seed": self._seed,
        }

    def restore(self, state: dict[str, int]) -> None:
        """Continues where `state` was taken; the data and the seed have to be the same."""
        if (missing := {"epoch", "position", "size", "seed"} - state.keys()) != set():
            raise ValueError(f"the cursor's state lacks {sorted(missing)}: {state}")
        if state["size"] != self._size or state["seed"] != self._seed:
            raise ValueError(
                f"this run was started on {state['size']} examples with seed {state['seed']}; "
                f"now there are {self._size} with seed {self._seed}, so it cannot continue exactly"
            )
        if state["epoch"] < 0 or not 0 <= state["position"] < self._size:
            raise ValueError(f"the cursor's state is out of range: {state}")
        self._start_epoch(state["epoch"])
        self._position = state["position"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._position = 0
        self._order = shuffled(self._size, self._seed, epoch)


def shuffled(size: int, *seed: int) -> np.ndarray:
    """A permutation i64[size] that depends on `size` and the seeds alone, in any NumPy version."""
    keys = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(size)
    return np.argsort(keys, kind="stable")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
