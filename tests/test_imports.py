"""The rooms of the tree: who may import whom, how long a file may be, what may not be read.

Imports point one way, train -> models -> jaxfp4 -> the compiled module, and `jaxfp4` needs nothing
but jax, flax and NumPy. The sources are parsed, not imported, so an import inside a function or
behind a condition counts too. Every finding names its file and line.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400

# What a room may import of the project itself. A folder that is not here is no room.
ROOMS = {
    "jaxfp4": {"jaxfp4"},
    "models": {"models", "jaxfp4"},
    "train": {"train", "models", "jaxfp4"},
    "benchmarks": {"benchmarks", "train", "models", "jaxfp4"},
    "tests": {"tests", "benchmarks", "train", "models", "jaxfp4"},
}
OPS_MAY_IMPORT = {"jaxfp4", "jax", "jaxlib", "flax", "numpy"} | sys.stdlib_module_names
COMPILED_MODULE = "jaxfp4._custom_calls"
ITS_USER = "jaxfp4/custom_calls.py"
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}


def imported_modules(node: ast.AST, package: list[str]) -> Iterator[str]:
    """The dotted names that `node`, a statement in a module of `package`, imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) + 1 - node.level] if node.level else []
        base = [*above, *([node.module] if node.module else [])]
        yield from (".".join([*base, alias.name]) for alias in node.names)


def reads_environment(node: ast.AST) -> bool:
    """Whether `node` names one of the ways in which `os` gives the process's environment."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in ENVIRONMENT for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ENVIRONMENT
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    )


def faults(path: str, source: str) -> list[str]:
    """What is wrong with the file at `path`, relative to the root: 'path:line: fault' each."""
    found = []
    length = len(source.splitlines())
    if length >= MAX_LINES:
        found.append(f"{path}:{MAX_LINES}: {length} lines; split it before {MAX_LINES}")
    if not path.endswith(".py"):
        return found + [
            f"{path}:{number}: reads the environment"
            for number, line in enumerate(source.splitlines(), start=1)
            if "getenv" in line
        ]

    room = path.split("/")[0]
    for node in ast.walk(ast.parse(source, path)):
        for module in imported_modules(node, path.split("/")[:-1]):
            where = f"{path}:{getattr(node, 'lineno', 0)}: imports {module}"
            top = module.split(".")[0]
            if top in ROOMS and top not in ROOMS[room]:
                found.append(f"{where}, but {room} may import only {sorted(ROOMS[room])}")
            if room == "jaxfp4" and top not in OPS_MAY_IMPORT | ROOMS.keys():
                found.append(f"{where}, but jaxfp4 needs only jax, flax and numpy")
            if module.startswith(COMPILED_MODULE) and path != ITS_USER:
                found.append(f"{where}, which is for {ITS_USER} alone")
        if room == "jaxfp4" and reads_environment(node):
            found.append(f"{path}:{getattr(node, 'lineno', 0)}: reads the environment")
    return found


def source_files() -> list[str]:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    files += [file for file in (ROOT / "ffi").rglob("*") if file.suffix in {".h", ".cc", ".cu"}]
    return sorted(str(file.relative_to(ROOT)) for file in files)


def test_the_tree_keeps_its_rules():
    files = source_files()
    assert {file.split("/")[0] for file in files} >= {"jaxfp4", "models", "train", "ffi"}
    found = [fault for file in files for fault in faults(file, (ROOT / file).read_text())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxfp4/a.py", "import os\nimport numpy as np\nfrom jax import lax\nfrom flax import nnx"),
        ("jaxfp4/a.py", "from jaxfp4.format import BLOCK\nfrom . import reference"),
        ("jaxfp4/custom_calls.py", "from jaxfp4 import _custom_calls"),
        ("models/a.py", "import safetensors\nfrom jaxfp4 import linear"),
        ("train/a.py", "import os\nimport models, optax\nfrom jaxfp4 import NVFP4\nos.environ"),
        ("tests/test_a.py", "from tests import oracle\nimport train.main"),
        ("ffi/a.cc", "int x;\n" * (MAX_LINES - 1)),
    ],
)
def test_what_is_allowed(path, source):
    assert faults(path, source) == []


@pytest.mark.parametrize(
    ("path", "source", "line", "words"),
    [
        ("jaxfp4/a.py", "import jax\nimport models", 2, "imports models"),
        ("jaxfp4/a.py", "def f():\n    from train.data import Example", 2, "imports train.data"),
        ("jaxfp4/a.py", "from ..train import data", 1, "imports train.data"),
        ("jaxfp4/a/b.py", "from ... import models", 1, "imports models"),
        ("jaxfp4/a.py", "try:\n    import optax\nexcept ImportError: ...", 2, "imports optax"),
        ("jaxfp4/a.py", "import jax, scipy.special", 1, "imports scipy.special"),
        ("models/a.py", "import train", 1, "imports train"),
        ("train/a.py", "\nfrom tests.oracle import quantize", 2, "imports tests.oracle.quantize"),
        ("train/a.py", "import benchmarks.cpu", 1, "imports benchmarks.cpu"),
        ("jaxfp4/linear.py", "from jaxfp4 import _custom_calls", 1, "imports jaxfp4._custom_calls"),
        ("jaxfp4/linear.py", "from . import _custom_calls", 1, "imports jaxfp4._custom_calls"),
        ("models/a.py", "import jaxfp4._custom_calls", 1, "imports jaxfp4._custom_calls"),
        ("jaxfp4/a.py", "import os\nDEBUG = os.environ.get('D')", 2, "reads the environment"),
        ("jaxfp4/a.py", "import os\ndef f():\n  return os.getenv('D')", 3, "reads the environment"),
        ("jaxfp4/a.py", "from os import environ", 1, "reads the environment"),
        ("ffi/a.cc", '#include <x>\nchar* d = std::getenv("D");', 2, "reads the environment"),
        ("models/a.py", "x = 1\n" * MAX_LINES, MAX_LINES, "400 lines"),
        ("ffi/cpu/a.h", "int x;\n" * MAX_LINES, MAX_LINES, "400 lines"),
    ],
)
def test_what_is_a_fault(path, source, line, words):
    [fault] = faults(path, source)
    assert fault.startswith(f"{path}:{line}: ")
    assert words in fault
