"""Fixtures for all tests."""

from pathlib import Path

import jax
import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data sets beside the repository; tests that need it skip without it."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder


@pytest.fixture(autouse=True)
def strict_dtype_promotion():
    """No test may rely on JAX promoting one dtype to another in silence."""
    with jax.numpy_dtype_promotion("strict"):
        yield
