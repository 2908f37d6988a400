"""A pool of processes that grade text which nobody has vetted.

Graders such as math-verify cannot run in the trainer's own process: their time limit is an alarm
that works in the main thread only, an answer such as 9^9^9^9 keeps one C call busy for ever, and
a library may start programs or write files for some input that nobody has thought of. So:

* Each grader runs in a process of its own, started fresh (`spawn`: a forked copy of a process with
  JAX's threads can deadlock). It imports its libraries once and then serves tasks.
* A task that takes longer than the time limit costs its process, which is killed and replaced;
  the task scores 0. One that hangs costs nobody else anything. The limit is on CPU time, kept by
  the kernel, so that no score depends on what else the machine does; a task that only waits is
  ended after ten times as long.
* The process may not use more memory than its limit, start programs, open sockets, or change
  files. Input above a size is refused before it is sent.
* Every such end is counted: `GraderPool.counts`.

A grader is named by a dotted path, "package.module:function", so that the trainer never imports
its libraries. Calls may come from any thread. As with everything that uses `spawn`, a script that
opens a pool needs the `if __name__ == "__main__":` guard (`python -m train` has it).
"""

import importlib
import logging
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

_log = logging.getLogger(__name__)

OUTCOMES: tuple[str, ...] = ("graded", "timeout", "too_long", "crash", "error")
"""How a task can end: graded; killed at the time limit; refused for its size; its process died;
the grader raised an exception. All but the first score 0."""

_START_LIMIT_S = 300.0
_WAITING_FACTOR = 10.0
_MEMORY_LIMIT_BYTES = 4 << 30

# Starting and reaping children is not thread-safe in multiprocessing.
_process_lock = threading.Lock()


class GraderPool:
    """Worker processes that run one grader; a context manager.

    Args:
      grader: dotted path of a function `grade(response: str, *arguments) -> float`.
      workers: number of processes.
      time_limit_s: CPU seconds for one task. Hanging answers cost a batch this time each, and
        the start of another process, divided by `workers`.
      max_chars: longer responses are refused.

    Raises:
      RuntimeError: the grader cannot be imported or its process does not start.
    """

    def __init__(
        self,
        grader: str,
        *,
        workers: int = 2,
        time_limit_s: float = 5.0,
        max_chars: int = 100_000,
    ):
        if workers < 1:
            raise ValueError(f"workers has to be at least 1, got {workers}")
        if not 0 < time_limit_s < math.inf:
            raise ValueError(f"time_limit_s has to be above 0, got {time_limit_s}")
        self._max_chars = max_chars
        self._counts = dict.fromkeys(OUTCOMES, 0)
        self._counts_lock = threading.Lock()
        self._workers = [_Worker(grader, time_limit_s) for _ in range(workers)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="grading")
        try:
            for worker in self._workers:
                worker.wait_until_ready()
                self._idle.put(worker)
        except BaseException:
            self.close()
            raise

    def grade(self, tasks: Sequence[tuple[Any, ...]]) -> list[float]:
        """Scores of tasks (response, *arguments), in their order; 0 for all that go wrong."""
        return list(self._threads.map(self._grade_one, tasks))

    @property
    def counts(self) -> dict[str, int]:
        """How many tasks had each of the OUTCOMES so far."""
        with self._counts_lock:
            return dict(self._counts)

    def close(self) -> None:
        """Ends all processes; tasks that have not begun are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _grade_one(self, task: tuple[Any, ...]) -> float:
        if len(task[0]) > self._max_chars:
            outcome, score = "too_long", 0.0
        else:
            worker = self._idle.get()
            try:
                outcome, score = worker.grade(task)
            finally:
                self._idle.put(worker)
        with self._counts_lock:
            self._counts[outcome] += 1
        return score


class _Worker:
    """One process, its pipe, and how to replace it."""

    def __init__(self, grader: str, time_limit_s: float):
        self._grader = grader
        self._time_limit_s = time_limit_s
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._grader, self._time_limit_s), daemon=True
        )
        with _process_lock:
            self._process.start()
        # The child holds the only other end, so its death reads as the end of the stream.
        theirs.close()
        self._ready = False
        self._running = True

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        problem = f"it did not answer within {_START_LIMIT_S} s"
        try:
            if self._connection.poll(_START_LIMIT_S):
                problem = self._connection.recv()
        except (EOFError, OSError):
            problem = "its process died; does the main script lack the __name__ guard?"
        if problem is not None:
            raise RuntimeError(f"grader {self._grader!r} cannot start: {problem}")
        self._ready = True

    def grade(self, task: tuple[Any, ...]) -> tuple[str, float]:
        """One of OUTCOMES and the score."""
        self.wait_until_ready()
        try:
            self._connection.send(task)
            if self._connection.poll(_WAITING_FACTOR * self._time_limit_s):
                score, problem = self._connection.recv()
                if problem is not None:
                    _log.warning("grader %s: %s", self._grader, problem)
                    return "error", 0.0
                return "graded", score
            outcome = "timeout"
        except (EOFError, OSError):  # its process is gone
            with _process_lock:
                self._process.join(10.0)
            outcome = "timeout" if self._process.exitcode == -signal.SIGPROF else "crash"
        self.stop()
        self._start()
        return outcome, 0.0

    def stop(self) -> None:
        if not self._running:
            return
        with _process_lock:
            self._process.kill()
            self._process.join()
            self._process.close()
        self._connection.close()
        self._running = False


def _serve(connection: Connection, grader: str, time_limit_s: float) -> None:
    """The process: answers None once the grader is there, then (score, problem) to each task."""
    # An interrupt from the keyboard goes to all processes; it is the trainer that closes the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # graders complain about every odd answer
    try:
        function = _resolve(grader)
    except BaseException:
        connection.send(traceback.format_exc(limit=-3))
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
    sys.addaudithook(_refuse_side_effects)
    connection.send(None)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        # The default action of SIGPROF ends the process: no Python code has to run for it, and it
        # works as well when the trainer has been killed meanwhile.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, time_limit_s)
        try:
            score, problem = float(function(*task)), None
            if not math.isfinite(score):
                score, problem = 0.0, f"the score is {score}"
        except Exception as error:
            score, problem = 0.0, f"{type(error).__name__}: {error}"[:500]
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send((score, problem))


def _resolve(path: str) -> Callable[..., float]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_REFUSED_EVENTS = (
    *("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty."),
    *("socket.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink"),
    *("os.chmod", "os.chown", "os.truncate", "os.kill", "shutil."),
)
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _refuse_side_effects(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook (PEP 578): the process may compute and read, nothing else.

    sympy parses plain expressions with eval. math-verify lets only digits and operators reach it,
    and this keeps a hole in that from mattering.
    """
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        writes = isinstance(flags, int) and flags & _WRITE_FLAGS
        if writes or (isinstance(mode, str) and set(mode) & set("wax+")):
            raise PermissionError(f"a grader may not write files: {arguments[0]!r}")
    elif event.startswith(_REFUSED_EVENTS):
        raise PermissionError(f"a grader may not do this: {event}")
