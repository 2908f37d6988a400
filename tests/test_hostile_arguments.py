"""Arguments that do not fit raise before anything is read, and never change a number in silence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from product_cases import assert_same_bits, f64, normal

import jaxfp4
from jaxfp4 import NVFP4, UNQUANTIZED, RMSNorm, SwiGLU

X, W = normal(0, (4, 64), jnp.bfloat16), normal(1, (24, 64))
BY_ROW = jaxfp4.Recipe(weight=jaxfp4.Quantizer("row"))
Q = jaxfp4.prepare(W, BY_ROW)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scale": Q.scale[:3]}, r"scale \(3,\), expected.*scale \(24,\)"),
        ({"block_scales": Q.block_scales[:1]}, r"block_scales must be.*\(24, 4\), got.*\(1, 4\)"),
        ({"codes": Q.codes.astype(jnp.float32)}, "codes must be uint8"),
        ({"scale": Q.scale.astype(jnp.bfloat16)}, "scale must be float32"),
    ],
)
def test_a_quantised_weight_whose_parts_do_not_fit(changes, says):
    with pytest.raises(ValueError, match=says):
        jaxfp4.linear(X, W, BY_ROW, quantized=dataclasses.replace(Q, **changes))


@pytest.mark.parametrize(
    ("front", "x", "error", "says"),
    [
        (RMSNorm(jnp.ones(0), 1e-6), X, ValueError, r"front.weight must have shape \(64,\)"),
        (RMSNorm(jnp.ones((2, 64)), 1e-6), X, ValueError, "front.weight must have shape"),
        (RMSNorm(jnp.ones(64, jnp.int32), 1e-6), X, TypeError, "front.weight must be bfloat16"),
        (SwiGLU(), jnp.zeros((4, 129), jnp.bfloat16), ValueError, "even number.*129"),
        ("swiglu", X, TypeError, "front must be SwiGLU.*'swiglu'"),
    ],
)
@pytest.mark.parametrize("recipe", [NVFP4, UNQUANTIZED])
def test_a_front_that_does_not_fit(front, x, error, says, recipe):
    with pytest.raises(error, match=says):
        jaxfp4.linear(x, W, recipe, front=front)


def test_a_weight_made_in_the_same_program_keeps_its_rounding():
    w, s = W.astype(jnp.bfloat16), normal(2, (24, 64), jnp.bfloat16)
    norm, t = normal(3, (64,), jnp.bfloat16), normal(4, (64,), jnp.bfloat16)

    def products(x, w, s, norm, t):
        front = RMSNorm(norm * t, 1e-6)
        return (
            jaxfp4.linear(x.astype(jnp.float32), w * s, UNQUANTIZED),
            jaxfp4.linear(x, w * s, NVFP4, front=front),
            jaxfp4.residual_add(x * t, x),
        )

    eager = products(X, w, s, norm, t)
    jax.tree.map(assert_same_bits, jax.jit(products)(X, w, s, norm, t), eager)


def test_preparing_inside_a_differentiated_function():
    def loss(w, quantized):
        q = jaxfp4.prepare(w, NVFP4) if quantized is None else quantized
        return jaxfp4.linear(X, w, quantized=q).astype(jnp.float32).sum()

    inside = jax.grad(loss)(W, None)
    assert_same_bits(inside, jax.grad(loss)(W, jaxfp4.prepare(W, NVFP4)))
    assert f64(inside).any()


@pytest.mark.parametrize("sizes", [[[2, 2, 3], [1, 1, 1]], [[2, 1, -2], [1, 1, 1]]])
def test_illegal_sizes_raise_under_vmap_too(sizes):
    w = normal(1, (3, 24, 64))
    run = jax.vmap(jaxfp4.grouped_linear, (None, None, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="group_sizes"):
        jax.block_until_ready(run(X, w, jnp.asarray(sizes, jnp.int32)))


def test_sharded_operands_of_an_explicit_mesh_are_refused():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        with pytest.raises(NotImplementedError, match="sharded over Explicit mesh axes"):
            jax.jit(jaxfp4.linear)(x, W)


@pytest.mark.parametrize("recipe", [NVFP4, UNQUANTIZED])
def test_empty_axes(recipe):
    assert jaxfp4.linear(X, W[:0], recipe).shape == (4, 0)
    wg, sizes = normal(1, (3, 24, 64)), jnp.zeros(3, jnp.int32)
    rows = jnp.zeros(5, jnp.int32)
    gradient = jax.grad(
        lambda x: jaxfp4.grouped_linear(x, wg, sizes, recipe, rows=rows).astype(jnp.float32).sum()
    )
    assert gradient(X[:0]).shape == (0, 64)


def test_statistics_of_the_largest_numbers():
    x = jnp.full((1, 16), 3.4e38)
    q = jaxfp4.quantize(x, amax=jnp.full((1,), 1e-38))
    assert jaxfp4.statistics(x, q)["relative_error"] == pytest.approx(1.0)
    assert jaxfp4.statistics(x, q)["saturated_blocks"] == 1
    q = jaxfp4.quantize(x)
    assert jaxfp4.statistics(x, q)["relative_error"] < 0.1


def test_arithmetic_on_codes_raises():
    for wrong in (lambda: Q + 1, lambda: 2.0 * Q, lambda: np.ones(3) @ Q, lambda: np.asarray(Q)):
        with pytest.raises(TypeError, match=r"dequantize|Fp4Array"):
            wrong()
