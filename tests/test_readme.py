"""The README's example runs as it is printed."""

import re
from pathlib import Path

import numpy as np


def test_the_example_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert np.isfinite(float(names["loss"]))
    assert (np.asarray(names["grads"]["gate_up"]["weight"]) != 0).any()
    assert (np.asarray(names["grads"]["norm"]) != 0).any()
