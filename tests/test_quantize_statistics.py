"""jaxfp4.statistics against counts made in NumPy from the oracle's answer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from quantizer_cases import Options, every_class, make

import jaxfp4

statistics = jax.jit(jaxfp4.statistics)


@functools.cache
def quantize(options: Options):
    return jax.jit(functools.partial(jaxfp4.quantize, **options.static))


@pytest.mark.parametrize("options", [Options("row"), Options("tensor", given_amax=True)], ids=str)
@every_class
def test_counts_and_error(name, options):
    x = make(name, "float32", 8192)
    amax = options.amax(x)
    actual = statistics(x, quantize(options)(x, amax=amax))

    q = oracle.quantize(x, **options.static, amax=amax)
    sf = oracle.E4M3_VALUES[q.block_scales]
    values = oracle.flush(x).reshape(*sf.shape, 16).astype(np.float64)
    largest = np.abs(values).max(-1)
    nonfinite = q.block_scales == 0x7F
    scale = q.scale.reshape(q.scale.shape + (1,) * (sf.ndim - q.scale.ndim)).astype(np.float64)
    assert actual["blocks"] == sf.size
    assert actual["flushed_blocks"] == ((sf == 0) & (largest > 0)).sum()
    assert actual["subnormal_blocks"] == ((sf > 0) & (sf < 2.0**-6)).sum()
    assert actual["nonfinite_blocks"] == nonfinite.sum()
    with np.errstate(invalid="ignore"):
        saturated = ~nonfinite & (largest > 6 * 464 * scale)
    assert actual["saturated_blocks"] == saturated.sum()
    if nonfinite.all():
        return
    assert actual["smallest_block_scale"] == sf[~nonfinite].min()
    kept = values[~nonfinite]
    error = oracle.dequantize(q).reshape(values.shape)[~nonfinite] - kept
    total = (kept**2).sum()
    relative = np.sqrt((error**2).sum() / total) if total else 0.0
    np.testing.assert_allclose(actual["relative_error"], relative, rtol=1e-5, atol=1e-9)


def test_another_tensor_is_refused():
    x = jnp.ones((2, 32))
    with pytest.raises(ValueError, match=r"\(2, 32\).*\(2, 16\)"):
        jaxfp4.statistics(x[:, :16], jaxfp4.quantize(x))
