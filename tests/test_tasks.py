"""Procedural tasks."""

import re

import pytest

from train.tasks import ARITHMETIC_ALPHABET, TAG_INSTRUCTION, Arithmetic, reasoning_gym_task
from train.tokenizer import CharTokenizer


def operands(examples):
    return [tuple(map(int, re.fullmatch(r"(\d+)\+(\d+)=", e.prompt).groups())) for e in examples]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("width", [0, 2, 3])
def test_answers_are_the_sums_in_one_format(width, reverse):
    task = Arithmetic(low=0, high=30, width=width, reverse_answer=reverse)
    sets = task.sets()
    tokenizer = CharTokenizer(ARITHMETIC_ALPHABET)
    for example in sets.supervised + sets.train + sets.heldout:
        left, right = example.prompt.rstrip("=").split("+")
        answer = example.answer[::-1] if reverse else example.answer
        assert int(left) + int(right) == int(answer)
        if width:
            assert (len(left), len(right), len(answer)) == (width, width, width + 1)
        else:
            assert answer == str(int(answer))
        assert len(tokenizer.encode(example.prompt)) <= task.max_prompt_length
        assert len(tokenizer.encode(example.answer)) <= task.max_answer_length


@pytest.mark.parametrize("seed", [0, 1])
def test_every_problem_is_in_one_set_and_so_is_its_mirror_image(seed):
    task = Arithmetic(low=3, high=42, seed=seed)
    sets = task.sets()
    parts = [operands(s) for s in (sets.supervised, sets.train, sets.heldout)]
    together = [p for part in parts for p in part]
    assert sorted(together) == [(a, b) for a in range(3, 43) for b in range(3, 43)]
    unordered = [{frozenset(p) for p in part} for part in parts]
    assert sum(map(len, unordered)) == task.pairs == 40 * 41 // 2
    assert [len(u) for u in unordered] == [328, 410, 82]


def test_sets_depend_on_the_seed_alone():
    assert Arithmetic(seed=5).sets() == Arithmetic(seed=5).sets()
    assert Arithmetic(seed=5).sets().heldout != Arithmetic(seed=6).sets().heldout
    # Written down once: the same on every machine.
    assert Arithmetic(seed=0, high=11).sets().heldout[0].prompt == "0+11="


def test_an_example_of_the_format():
    assert Arithmetic().answer(58, 67) == "125"
    assert Arithmetic(reverse_answer=True).answer(58, 67) == "521"
    assert Arithmetic(width=3).answer(58, 67) == "0125"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": -1}, "got low=-1"),
        ({"low": 5, "high": 4}, "got low=5, high=4"),
        ({"width": 1}, "width=1 is too small for high=99"),
        ({"supervised": 0.9}, "supervised=0.9, heldout=0.1"),
        ({"heldout": 0.0}, "heldout=0.0"),
        ({"high": 2}, "only 6 pairs"),
    ],
)
def test_ranges_that_make_no_sets_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Arithmetic(**options)


@pytest.fixture(scope="module")
def chain_sum():
    return reasoning_gym_task("chain_sum", train=40, heldout=10, seed=1, max_terms=3)


def test_reasoning_gym_problems_depend_on_the_seed_alone(chain_sum):
    again = reasoning_gym_task("chain_sum", train=40, heldout=10, seed=1, max_terms=3)
    assert again == chain_sum
    other = reasoning_gym_task("chain_sum", train=40, heldout=10, seed=2, max_terms=3)
    assert other.train != chain_sum.train


def test_reasoning_gym_sets_share_no_problem(chain_sum):
    # One-digit sums of two repeat soon.
    sets = reasoning_gym_task(
        "chain_sum", train=200, heldout=20, seed=1, min_terms=2, max_terms=2, max_digits=1
    )
    prompts = [e.prompt for e in sets.train + sets.heldout]
    assert len(set(prompts)) == len(prompts) < 220
    assert len(sets.heldout) == 20
    for example in chain_sum.train + chain_sum.heldout:
        expression = re.search(r"problem: (.*) =", example.prompt).group(1)
        numbers = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
        assert sum(map(int, numbers)) == int(example.answer)
        assert example.prompt.endswith(TAG_INSTRUCTION)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_task", {}, "no reasoning-gym task 'no_such_task'; there are: .*chain_sum"),
        ("chain_sum", {"no_such_option": 1}, "refuses .*no_such_option"),
        ("chain_sum", {"min_terms": 5, "max_terms": 4}, "refuses"),
        ("rubiks_cube", {}, "no answer in text"),
        ("chain_sum", {"max_terms": 2, "max_digits": 1, "heldout": 200}, "different problems"),
        ("chain_sum", {"train": 0}, "at least 1"),
    ],
)
def test_reasoning_gym_tasks_that_cannot_be_used_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        reasoning_gym_task(name, **({"train": 30, "heldout": 5, "seed": 0} | options))
