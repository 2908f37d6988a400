"""Graders that misbehave, for the tests of the grading pool's workers."""

import ctypes
import os
import socket
import subprocess
import time
from pathlib import Path


def odd(response: str, argument: str = "") -> float:
    """Does what the response says."""
    if response == "hang in Python":
        time.sleep(3600)
    if response == "hang in C":
        9**9**9**9
    if response == "die":
        os._exit(1)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "raise":
        raise RuntimeError("this answer is odd")
    if response == "eat memory":
        return float(len(bytearray(6 << 30)))
    if response == "nan":
        return float("nan")
    if response == "write":
        Path(argument).write_text("written")
    if response == "remove":
        Path(argument).unlink()
    if response == "system":
        os.system(f"touch {argument}")
    if response == "run":
        subprocess.run(["touch", argument], check=True)
    if response == "connect":
        socket.create_connection(("127.0.0.1", 9))
    if response == "eval":
        eval(argument)
    return 1.0


def process_id(response: str) -> float:
    """The worker's process id."""
    del response
    return float(os.getpid())
