"""The pool of grading processes, and math-verify through it."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from train.grading import OUTCOMES, GraderPool

REPOSITORY = Path(__file__).parents[1]
MATH = "train.math_grader:grade"


@pytest.fixture(scope="module")
def math_pool():
    with GraderPool(MATH, time_limit_s=3.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def odd_pool():
    with GraderPool("odd_graders:odd", time_limit_s=0.5, max_chars=1000) as pool:
        yield pool


def change(pool, tasks):
    """The scores of the tasks and what they added to the pool's counts, zeros left out."""
    before = pool.counts
    scores = pool.grade(tasks)
    after = pool.counts
    return scores, {k: after[k] - before[k] for k in OUTCOMES if after[k] != before[k]}


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ("hang in Python", "timeout"),
        ("hang in C", "timeout"),
        ("die", "crash"),
        ("segfault", "crash"),
        ("raise", "error"),
        ("eat memory", "error"),
        ("nan", "error"),
        ("x" * 1001, "too_long"),
        ("x" * 1000, "graded"),
    ],
)
def test_each_end_is_counted_and_only_a_graded_task_scores(odd_pool, response, outcome):
    scores, counts = change(odd_pool, [("fine",), (response,), ("fine",), ("fine",)])
    assert scores == [1.0, float(outcome == "graded"), 1.0, 1.0]
    assert counts == ({"graded": 4} if outcome == "graded" else {"graded": 3, outcome: 1})


@pytest.mark.parametrize("action", ["write", "system", "run", "connect", "eval"])
def test_a_grader_cannot_write_files_or_start_programs(odd_pool, tmp_path, action):
    target = tmp_path / "pwned"
    code = f"__import__('os').system('touch {target}')"
    scores, counts = change(odd_pool, [(action, code if action == "eval" else str(target))])
    assert scores == [0.0]
    assert counts == {"error": 1}
    assert not target.exists()


def test_a_grader_cannot_remove_files(odd_pool, tmp_path):
    target = tmp_path / "precious"
    target.write_text("kept")
    assert change(odd_pool, [("remove", str(target))]) == ([0.0], {"error": 1})
    assert target.read_text() == "kept"


def test_every_worker_can_hang_and_the_batch_still_ends(odd_pool):
    tasks = [("hang in C",)] * 5 + [("fine",)] * 5
    scores, counts = change(odd_pool, tasks)
    assert scores == [0.0] * 5 + [1.0] * 5
    assert counts == {"timeout": 5, "graded": 5}


def test_workers_are_kept_between_batches_and_gone_after_closing():
    with GraderPool("odd_graders:process_id", workers=2) as pool:
        ids = {int(i) for _ in range(2) for i in pool.grade([("",)] * 40)}
        assert os.getpid() not in ids
        assert len(ids) <= 2
    for process in ids:
        with pytest.raises(ProcessLookupError):  # neither running nor a zombie
            os.kill(process, 0)
    with pytest.raises(RuntimeError):
        pool.grade([("",)])


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ("no_such_module:grade", "No module named 'no_such_module'"),
        ("odd_graders:no_such_function", "no attribute 'no_such_function'"),
    ],
)
def test_a_grader_that_cannot_be_imported_is_an_error_at_once(grader, message):
    with pytest.raises(RuntimeError, match=message):
        GraderPool(grader)


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"time_limit_s": 0.0}])
def test_senseless_limits_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        GraderPool(MATH, **arguments)


def test_a_killed_trainer_leaves_neither_idle_nor_hanging_graders():
    script = (
        "from train.grading import GraderPool\n"
        "pool = GraderPool('odd_graders:odd', workers=2, time_limit_s=1.0)\n"
        "pool._workers[1]._connection.send(('hang in C',))\n"
        "print(*(worker._process.pid for worker in pool._workers), flush=True)\n"
        "input()\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    with trainer:
        processes = [int(i) for i in trainer.stdout.readline().split()]
        trainer.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(map(_runs, processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [_runs(p) for p in processes] == [False, False]


def test_published_grading_cases_come_out_as_expected(math_pool, shared_data):
    lines = (shared_data / "grading" / "cases.jsonl").read_text().splitlines()
    cases = [json.loads(line) for line in lines]
    scores, counts = change(math_pool, [(c["response"], c["gold"]) for c in cases])
    wrong = {
        c["name"]: score
        for c, score in zip(cases, scores, strict=True)
        if c["expect"] is not None and score != float(c["expect"])
    }
    assert wrong == {}
    assert counts == {"graded": 40, "timeout": 2}


@pytest.mark.parametrize(
    ("response", "gold", "score"),
    [
        ("The answer is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("\\boxed{0.333}", "\\frac{1}{3}", 0.0),
        ("<think>\\boxed{7}</think>It is \\boxed{8}.", "8", 1.0),
        ("<think>\\boxed{8}</think>It is \\boxed{7}.", "8", 0.0),
        ("<think>\\boxed{8}</think>", "8", 0.0),
        ("So it is 12.\n\nAnswer: 34", "34", 1.0),
        ("Answer: -3", "-3", 1.0),
        ("", "7", 0.0),
        ("nothing at all", "7", 0.0),
        ("\ud800 \\boxed{7}", "7", 1.0),
    ],
)
def test_final_answers_are_compared_as_mathematics(math_pool, response, gold, score):
    assert math_pool.grade([(response, gold)]) == [score]


@pytest.mark.parametrize(
    ("response", "tolerance", "score"),
    [
        ("\\boxed{4.25}", 0.1, 1.0),
        ("\\boxed{4.25}", None, 0.0),
        ("\\boxed{4.35}", 0.1, 0.0),
        ("\\boxed{x}", 0.1, 0.0),
        ("\\boxed{i}", 0.1, 0.0),
        ("none", 0.1, 0.0),
    ],
)
def test_a_tolerance_is_absolute_and_for_numbers(math_pool, response, tolerance, score):
    assert math_pool.grade([(response, "4.2", tolerance)]) == [score]


def test_endless_answers_from_eight_threads_end_in_time_with_reward_zero(math_pool):
    before = math_pool.counts
    evil = ["9^(9^(9^9))", "\\boxed{9^{9^{9^9}}}"]
    tasks = [[("\\boxed{1}", "1"), (evil[i], "1")] if i < 2 else [("\\boxed{1}", "1")] * 3
             for i in range(8)]  # fmt: skip
    with ThreadPoolExecutor(8) as threads:
        scores = list(threads.map(math_pool.grade, tasks))
    assert scores == [[1.0, 0.0]] * 2 + [[1.0, 1.0, 1.0]] * 6
    assert math_pool.counts["timeout"] == before["timeout"] + 2


def test_factorials_of_factorials_end_with_reward_zero(math_pool):
    scores, counts = change(math_pool, [("10!!!!", "1"), ("\\boxed{10!!!!}", "1")])
    assert scores == [0.0, 0.0]
    assert sum(counts.values()) == 2


def test_code_in_an_answer_is_not_run_and_a_megabyte_is_refused(math_pool, tmp_path):
    target = tmp_path / "pwned"
    code = f'__import__("os").system("touch {target}")'
    codes = [code, f"\\boxed{{{code}}}", f"${code}$", f"The final answer is {code}.", f"1+{code}"]
    scores, counts = change(math_pool, [*((c, "99") for c in codes), ("1" * 1_000_000, "99")])
    assert scores == [0.0] * 6
    assert counts["too_long"] == 1
    assert not target.exists()
    # The pool's files would be relative to the directory of the tests.
    assert not Path("pwned").exists()


def test_grading_works_from_a_subprocess():
    script = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from train.grading import GraderPool\n"
        f"with GraderPool({MATH!r}, workers=1, time_limit_s=1.0) as pool:\n"
        "    with ThreadPoolExecutor(8) as threads:\n"
        "        tasks = [('\\\\boxed{2}', '2')] * 7 + [('9^(9^(9^9))', '1')]\n"
        "        print(sum(threads.map(lambda task: pool.grade([task])[0], tasks)))\n"
        "    print(pool.counts['timeout'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        env=_environment(),
        check=True,
    )
    assert done.stdout.split() == ["7.0", "1"]
    assert done.stderr == ""


def _environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    }


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
