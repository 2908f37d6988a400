"""Fixtures for all tests."""

import os
from pathlib import Path

# Before JAX starts: sharding is tested on eight CPU devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

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
