"""Rewards: built-in ones, plug-ins, and the overlong penalty."""

import json

import numpy as np
import pytest

from train.data import Example
from train.datasets import read_dataset
from train.rewards import BUILT_IN, open_reward, soft_overlong_penalty

SUM = Example("12+7=", "19")


def reward_of(name, pairs):
    with open_reward(name) as reward:
        return reward([e for e, _ in pairs], [r for _, r in pairs])


@pytest.mark.parametrize(
    ("name", "response", "expected"),
    [
        ("exact_match", "19", 1.0),
        ("exact_match", "19 ", 0.0),
        ("exact_match", "1\u24009", 0.0),
        ("exact_match", "", 0.0),
        ("exact_match", "19.0", 0.0),
        ("tagged_match", "<answer>19</answer>", 1.0),
        ("tagged_match", "<answer>1</answer> no <answer>\n19 </answer>.", 1.0),
        ("tagged_match", "<answer>19</answer> no <answer>1</answer>", 0.0),
        ("tagged_match", "<answer>19</answer><answer>", 0.0),
        ("tagged_match", "<answer>19", 0.0),
        ("tagged_match", "19", 0.0),
        ("boxed", "So \\boxed{7}", 1.0),
        ("boxed", "\\boxed {7}", 1.0),
        ("boxed", "<think>\\boxed{1} \\boxed{2}</think>\\boxed{3}", 1.0),
        ("boxed", "<think>\\boxed{1}</think>3", 0.0),
        ("boxed", "\\boxed{1} \\boxed{2}", 0.0),
        ("boxed", "\\boxed{ }", 0.0),
        ("boxed", "\\boxed", 0.0),
        ("boxed", "7", 0.0),
    ],
)
def test_text_rewards(name, response, expected):
    assert reward_of(name, [(SUM, response), (SUM, "no")]) == [expected, 0.0]


def test_math_and_its_tolerance_come_from_the_example():
    near = Example("", "4.2", {"tolerance": 0.1})
    exact = Example("", "4.2")
    with open_reward("math", workers=1) as reward:
        responses = ["\\boxed{4.25}", "\\boxed{4.25}", "\\boxed{\\frac{21}{5}}", "x" * 200_000]
        assert reward([near, exact, exact, exact], responses) == [1.0, 0.0, 1.0, 0.0]
        assert reward.counts == {
            "graded": 3, "timeout": 0, "too_long": 1, "crash": 0, "error": 0,
        }  # fmt: skip
        assert reward([], []) == []


@pytest.fixture(scope="module")
def ifeval():
    with open_reward("ifeval", workers=1) as reward:
        yield reward


def test_ifeval_takes_instructions_from_the_example(ifeval):
    example = Example(
        "Write without commas, at most 5 words.",
        "",
        {
            "instructions": ["punctuation:no_comma", "length_constraints:number_words"],
            "arguments": [{}, {"relation": "less than", "num_words": 5}],
        },
    )
    sentences = Example(
        "Two sentences at least.",
        "",
        {
            "instructions": ["length_constraints:number_sentences"],
            "arguments": [{"relation": "at least", "num_sentences": 2}],
        },
    )
    capitals = Example(
        "Two words in capitals at least.",
        "",
        {
            "instructions": ["change_case:capital_word_frequency"],
            "arguments": [{"capital_relation": "at least", "capital_frequency": 2}],
        },
    )
    pairs = [
        (example, "No commas here.", 1.0),
        (example, "Commas, here.", 0.0),
        (example, "No commas but too many words.", 0.0),
        (example, "", 0.0),
        (sentences, "Dr. Smith came. He left.", 1.0),
        (sentences, "Dr. Smith came.", 0.0),
        (capitals, "THE END", 1.0),
        (capitals, "THE end", 0.0),
    ]
    scores = ifeval([e for e, _, _ in pairs], [r for _, r, _ in pairs])
    assert scores == [score for _, _, score in pairs]


def test_an_instruction_that_ifeval_does_not_know_is_counted_as_an_error(ifeval):
    example = Example("Say yes.", "", {"instructions": ["no:such"], "arguments": [{}]})
    before = ifeval.counts["error"]
    assert ifeval([example], ["Yes."]) == [0.0]
    assert ifeval.counts["error"] == before + 1


def test_ifeval_scores_of_published_answers(ifeval, shared_data):
    examples = read_dataset("ifeval", shared_data / "ifeval" / "input_data.jsonl")
    answers = {}
    for line in (shared_data / "ifeval" / "gpt4_responses.jsonl").read_text().splitlines():
        answer = json.loads(line)
        answers[answer["prompt"]] = answer["response"]
    examples = [e for e in examples if e.prompt in answers]
    assert len(examples) == 540
    # 77.2 %; the figure published for these answers is 76.9 %.
    assert sum(ifeval(examples, [answers[e.prompt] for e in examples])) == 417


# ---- plug-ins ----------------------------------------------------------------------------------


def lengths(examples, responses):
    return [len(r) / 10 for r in responses]


def as_array(examples, responses):
    return np.asarray([len(r) for r in responses], np.float32)


def one_too_few(examples, responses):
    return [0.0] * (len(responses) - 1)


def not_a_number(examples, responses):
    return [0.0, float("nan")][: len(responses)]


def infinite(examples, responses):
    return [float("inf")] * len(responses)


def words(examples, responses):
    return ["1.0"] * len(responses)


def ragged(examples, responses):
    return [[1.0], [1.0, 2.0]]


def nothing(examples, responses):
    return None


NOT_A_FUNCTION = 7


def test_a_function_of_ones_own_is_a_reward():
    assert reward_of(f"{__name__}:lengths", [(SUM, "abc"), (SUM, "")]) == [0.3, 0.0]
    assert reward_of(f"{__name__}:as_array", [(SUM, "abc"), (SUM, "")]) == [3.0, 0.0]
    with open_reward(f"{__name__}:lengths") as reward:
        assert reward.counts == {}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (one_too_few, r"has to return 2 numbers, got an array of shape \(1,\)"),
        (not_a_number, r"returned nan for response 1 \('b'\)"),
        (infinite, r"returned inf for response 0 \('a'\)"),
        (words, "dtype <U3"),
        (ragged, "no list of numbers"),
        (nothing, "dtype object"),
    ],
)
def test_a_plug_in_that_returns_something_else_is_an_error(function, message):
    with pytest.raises(ValueError, match=message) as error:
        reward_of(f"{__name__}:{function.__name__}", [(SUM, "a"), (SUM, "b")])
    assert f"{__name__}:{function.__name__}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exactmatch", f"one of {', '.join(BUILT_IN)} or 'package.module:function', got"),
        ("module:", "or 'package.module:function'"),
        (":function", "or 'package.module:function'"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported: ModuleNotFoundError"),
        (f"{__name__}:no_such", "has no function 'no_such'; it has .*lengths"),
        (f"{__name__}:NOT_A_FUNCTION", "has no function 'NOT_A_FUNCTION'"),
    ],
)
def test_a_reward_that_does_not_exist_is_an_error(name, message):
    with pytest.raises(ValueError, match=message), open_reward(name):
        pass


def test_a_module_that_breaks_while_it_is_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="ZeroDivisionError"), open_reward("broken_reward:f"):
        pass


def test_examples_and_responses_have_to_match():
    with (
        pytest.raises(ValueError, match="1 examples with 2 responses"),
        open_reward("exact_match") as reward,
    ):
        reward([SUM], ["19", "19"])


# ---- overlong penalty --------------------------------------------------------------------------


def test_overlong_penalty_is_dapos():
    # Equation 13 of the paper with L_max = 20, L_cache = 4.
    lengths = np.asarray([[0, 15, 16, 17], [18, 19, 20, 100]], np.int32)
    penalty = soft_overlong_penalty(lengths, max_length=20, buffer=4)
    assert penalty.dtype == np.float32
    assert penalty.tolist() == [[0, 0, 0, -0.25], [-0.5, -0.75, -1, -1]]


@pytest.mark.parametrize("buffer", [0, 21])
def test_overlong_buffers_that_make_no_sense_are_refused(buffer):
    with pytest.raises(ValueError, match=f"buffer={buffer}, max_length=20"):
        soft_overlong_penalty([1], max_length=20, buffer=buffer)
