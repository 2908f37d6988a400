"""JSONL files, their adapters, and the cursor over prompts."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data import DataError, Example, PromptCursor, Row, read_jsonl, shuffled
from train.datasets import BOXED_INSTRUCTION, DATASETS, last_boxed, read_dataset

ROWS = {
    "gsm8k": (
        {"question": "How many clips?", "answer": "48/2 = <<48/2=24>>24.\n#### 1,072"},
        Example(f"How many clips?\n{BOXED_INSTRUCTION}", "1072"),
    ),
    "svamp": (
        {"Body": "He has 290 bananas ", "Question": "How many each?", "Answer": 145.0, "ID": "a"},
        Example(f"He has 290 bananas. How many each?\n{BOXED_INSTRUCTION}", "145"),
    ),
    "dapo": (
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve it. Answer: $Answer", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4"},
        },
        Example(
            [{"role": "user", "content": "Solve it. Answer: $Answer"}], "34", {"index": "9a9b6eb4"}
        ),
    ),
    "math": (
        {"problem": "Halve it.", "level": "1", "solution": "\\boxed{2} no \\boxed{\\frac{1}{2}}."},
        Example(f"Halve it.\n{BOXED_INSTRUCTION}", "\\frac{1}{2}"),
    ),
    "olympiadbench": (
        {
            "question": "Find all.",
            "context": None,
            "final_answer": ["$69$,$84$", "$\\frac12$"],
            "error": "1e-1",
            "unit": None,
        },
        Example(f"Find all.\n{BOXED_INSTRUCTION}", "69,84, \\frac12", {"tolerance": 0.1}),
    ),
    "ifeval": (
        {
            "key": 1001,
            "prompt": "No commas.",
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [{"num_words": None}, {"relation": "at least", "num_words": 300}],
        },
        Example(
            "No commas.",
            "",
            {
                "instructions": ["punctuation:no_comma", "length_constraints:number_words"],
                "arguments": [{}, {"relation": "at least", "num_words": 300}],
            },
        ),
    ),
}


def write(folder, *rows):
    path = folder / "rows.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", DATASETS)
def test_adapters_read_the_published_fields(tmp_path, kind):
    row, expected = ROWS[kind]
    assert read_dataset(kind, write(tmp_path, row, "", row))[0] == expected


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("gsm8k", "question"),
        ("gsm8k", "answer"),
        ("svamp", "Body"),
        ("svamp", "Question"),
        ("svamp", "Answer"),
        ("dapo", "prompt"),
        ("dapo", "reward_model"),
        ("math", "problem"),
        ("math", "solution"),
        ("olympiadbench", "question"),
        ("olympiadbench", "final_answer"),
        ("ifeval", "prompt"),
        ("ifeval", "instruction_id_list"),
        ("ifeval", "kwargs"),
    ],
)
def test_a_missing_field_is_named_with_file_and_line(tmp_path, kind, field):
    row, _ = ROWS[kind]
    path = write(tmp_path, row, "", {k: v for k, v in row.items() if k != field})
    with pytest.raises(DataError) as error:
        read_dataset(kind, path)
    assert str(error.value).startswith(f"{path}:3: field '{field}' ")
    assert "is missing" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gsm8k", {"answer": "no mark 7"}, "has to end in '#### '"),
        ("gsm8k", {"answer": "#### seven"}, "got 'seven'"),
        ("gsm8k", {"question": 7}, "field 'question' has to be str, got int: 7"),
        ("gsm8k", {"question": " "}, "field 'question' is empty"),
        ("gsm8k", {"question": "\ud800"}, "field 'question' is not valid Unicode"),
        ("svamp", {"Answer": "145"}, "field 'Answer' has to be int or float, got str"),
        ("svamp", {"Answer": True}, "field 'Answer' has to be int or float, got bool"),
        ("svamp", {"Answer": float("nan")}, "field 'Answer' has to be finite"),
        ("dapo", {"prompt": "text"}, "field 'prompt' has to be list"),
        ("dapo", {"prompt": ["text"]}, r"field 'prompt\[0\]' has to be dict"),
        ("dapo", {"prompt": []}, "field 'prompt' is an empty list"),
        ("dapo", {"prompt": [{"role": "user"}]}, r"field 'prompt\[0\].content' \(str\) is missing"),
        ("dapo", {"reward_model": {"style": "x"}}, "'reward_model.ground_truth' .* is missing"),
        ("math", {"solution": "So it is 7."}, "no .boxed answer"),
        ("olympiadbench", {"final_answer": []}, "'final_answer' is an empty list"),
        ("olympiadbench", {"final_answer": [7]}, r"'final_answer\[0\]' has to be str, got int"),
        ("olympiadbench", {"error": "0.1,0.2"}, "'error' has to be one number"),
        ("ifeval", {"kwargs": [{}]}, "one object for each of the 2 instructions, got 1"),
    ],
)
def test_a_bad_field_is_named_with_file_and_line(tmp_path, kind, change, message):
    path = write(tmp_path, ROWS[kind][0], ROWS[kind][0] | change)
    with pytest.raises(DataError, match=f"^{path}:2: .*{message}"):
        read_dataset(kind, path)


@pytest.mark.parametrize("line", ["{", "[1]", "7", '{"question": "a"} {}', "[" * 100_000])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    path = write(tmp_path, ROWS["gsm8k"][0], line)
    with pytest.raises(DataError, match=f"^{path}:2: "):
        read_dataset("gsm8k", path)


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(DataError, match=f"^{path}:1: not valid JSON"):
        read_dataset("gsm8k", path)


def test_a_file_without_examples_and_an_unknown_kind_are_refused(tmp_path):
    with pytest.raises(DataError, match="no examples"):
        read_dataset("gsm8k", write(tmp_path, "", "  "))
    with pytest.raises(ValueError, match=r"one of gsm8k, .* got 'gsm9k'"):
        read_dataset("gsm9k", tmp_path)


def test_repeats_are_kept_once_where_the_published_file_repeats(tmp_path):
    row = ROWS["dapo"][0]
    other = row | {"reward_model": {"ground_truth": "35"}}
    path = write(tmp_path, row, other, row, row)
    assert [e.answer for e in read_dataset("dapo", path)] == ["34", "35"]
    assert len(read_jsonl(path, DATASETS["dapo"].adapter)) == 4


@pytest.mark.parametrize(
    ("kind", "file", "count", "answer"),
    [
        ("gsm8k", "gsm8k/train.jsonl", 7473, "72"),
        ("gsm8k", "gsm8k/test.jsonl", 1319, "18"),
        ("svamp", "svamp/test.jsonl", 1000, "145"),
        ("olympiadbench", "olympiadbench/test.jsonl", 675, "2"),
        ("ifeval", "ifeval/input_data.jsonl", 541, ""),
    ],
)
def test_published_files_are_read_whole(shared_data, kind, file, count, answer):
    examples = read_dataset(kind, shared_data / file)
    assert len(examples) == count
    assert examples[0].answer == answer
    if kind == "gsm8k":
        # What the files' own text says: the last number, commas aside.
        rows = [json.loads(line) for line in (shared_data / file).read_text().splitlines()]
        assert [e.answer for e in examples] == [
            r["answer"].split("#### ")[1].replace(",", "") for r in rows
        ]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\fbox{3}", None),
        ("\\fboxed{3}", "3"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("none", None),
    ],
)
def test_last_boxed_answer(text, content):
    assert last_boxed(text) == content


def test_a_row_reads_null_as_absent():
    row = Row({"a": None, "b": 0})
    assert not row.has("a")
    assert row.has("b")
    assert not row.has("c")


# ---- the cursor --------------------------------------------------------------------------------


@given(
    size=st.integers(1, 40),
    seed=st.integers(0, 2**40),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    stop=st.integers(0, 20),
)
def test_no_example_is_lost_or_repeated_and_resuming_continues_exactly(size, seed, counts, stop):
    counts = [min(c, size) for c in counts]
    cursor = PromptCursor(size, seed)
    taken, states = [], []
    for count in counts:
        states.append(json.loads(json.dumps(cursor.state())))
        batch = cursor.take(count)
        assert len(batch) == count
        taken.append(batch)
    flat = [i for batch in taken for i in batch]
    for start in range(0, len(flat), size):
        epoch = Counter(flat[start : start + size])
        assert set(epoch) <= set(range(size))
        assert max(epoch.values()) == 1
    stop = min(stop, len(counts) - 1)
    resumed = PromptCursor(size, seed)
    resumed.restore(states[stop])
    assert resumed.state() == states[stop]
    assert [resumed.take(count) for count in counts[stop:]] == taken[stop:]
    assert resumed.state() == cursor.state()


def test_epochs_and_seeds_are_different_orders():
    def epoch(cursor):
        return cursor.take(100)

    first, second = PromptCursor(100, 0), PromptCursor(100, 1)
    orders = [epoch(first), epoch(first), epoch(second), epoch(second), list(range(100))]
    assert len({tuple(order) for order in orders}) == 5


def test_the_order_is_the_same_on_every_machine():
    # Written down once: a run that is resumed elsewhere has to go on with the same examples.
    assert shuffled(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert shuffled(8, 3, 1).tolist() == [0, 6, 2, 1, 3, 7, 4, 5]


@pytest.mark.parametrize("count", [0, -1, 11])
def test_a_batch_larger_than_the_data_is_refused(count):
    with pytest.raises(ValueError, match=f"between 1 and the number of examples, 10, got {count}"):
        PromptCursor(10, 0).take(count)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 11}, "started on 11 examples"),
        ({"seed": 1}, "with seed 1"),
        ({"position": 10}, "out of range"),
        ({"position": -1}, "out of range"),
        ({"epoch": -1}, "out of range"),
    ],
)
def test_a_state_of_another_run_is_refused(change, message):
    cursor = PromptCursor(10, 0)
    with pytest.raises(ValueError, match=message):
        cursor.restore(cursor.state() | change)
    with pytest.raises(ValueError, match="lacks"):
        cursor.restore({"epoch": 0})


@pytest.mark.parametrize(("size", "seed"), [(0, 0), (1, -1)])
def test_senseless_cursors_are_refused(size, seed):
    with pytest.raises(ValueError, match="has to be"):
        PromptCursor(size, seed)
