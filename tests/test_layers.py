"""The Flax layers: their initial weights, and that they call the ops."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp4


@pytest.mark.parametrize("groups", [None, 8])
def test_initial_weights_have_variance_one_over_fan_in(groups):
    rngs = nnx.Rngs(0)
    if groups is None:
        layer, shape = jaxfp4.Linear(256, 512, rngs=rngs), (512, 256)
    else:
        layer, shape = jaxfp4.GroupedLinear(groups, 256, 64, rngs=rngs), (groups, 64, 256)
    weight = np.asarray(layer.weight[...])
    assert (weight.shape, weight.dtype) == (shape, np.float32)
    # 2^17 draws: the estimate of the deviation is within 0.2 %.
    np.testing.assert_allclose(weight.std() * np.sqrt(256), 1.0, atol=0.01)
    np.testing.assert_allclose(weight.mean(), 0.0, atol=1e-3)


def test_layers_call_the_ops():
    x, sizes = jnp.linspace(-1, 1, 4 * 32).reshape(4, 32), jnp.array([1, 3], jnp.int32)
    dense = jaxfp4.Linear(32, 16, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(dense(x), jaxfp4.linear(x, dense.weight[...]))
    grouped = jaxfp4.GroupedLinear(2, 32, 16, rngs=nnx.Rngs(0))
    expected = jaxfp4.grouped_linear(x, grouped.weight[...], sizes)
    np.testing.assert_array_equal(grouped(x, sizes), expected)
