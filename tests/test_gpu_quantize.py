"""The three quantize custom calls on a GPU: every byte equals the CPU's.

Results are written into donated buffers full of a pattern, so that an element that is not written
is seen.
"""

import functools
import itertools
from dataclasses import dataclass, replace

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantizer_cases import Options, assert_same_bytes, every_class, every_dtype, every_option

from jaxfp4.custom_calls import call

POISON = 0xA5
NONE, SWIGLU, RMSNORM = 0, 1, 2


def gpus() -> list[jax.Device]:
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpus(), reason="JAX finds no GPU"),
]


@dataclass(frozen=True)
class Attributes:
    front: int = NONE
    eps: float = 1e-6
    rows_per_scale: int = 1
    pow2_scale: bool = False
    four_over_six: bool = False

    @property
    def bound(self) -> dict[str, object]:
        return {
            "front": np.int64(self.front),
            "eps": np.float32(self.eps),
            "rows_per_scale": np.int64(self.rows_per_scale),
            "pow2_scale": self.pow2_scale,
            "four_over_six": self.four_over_six,
        }


def result_types(target: str, m: int, depth: int, groups: int, attributes: Attributes) -> list:
    scale = ((m // attributes.rows_per_scale,), jnp.float32)
    if target == "quantize_expanded":
        return [((m, depth), jnp.bfloat16), scale]
    codes = ((m, depth // 2), jnp.uint8)
    if target == "quantize":
        return [codes, ((m, depth // 16), jnp.float8_e4m3fn), scale]
    tiles = -(-(m + 128 * groups) // 128) * -(-(depth // 16) // 4)
    return [codes, ((512 * tiles + 64,), jnp.uint8), scale]


@functools.cache
def poisoned(types: tuple):
    """A function that makes arrays of these types on the default device, every byte POISON."""

    def full(shape, dtype):
        size = jnp.dtype(dtype).itemsize
        pattern = jnp.full(shape, int.from_bytes([POISON] * size), f"u{size}")
        return jax.lax.bitcast_convert_type(pattern, dtype)

    return jax.jit(lambda: tuple(full(*each) for each in types))


@functools.cache
def compiled(target: str, attributes: Attributes, results: tuple):
    def run(operands, poison):
        return tuple(call(target, results, *operands, **attributes.bound))

    return jax.jit(run, donate_argnums=1, keep_unused=True)


def on(device, target, x, attributes, weight=None, rows=None, amax=None, group_sizes=None):
    """The call's results on a device."""
    optional = [(weight, np.float32), (rows, np.int32), (amax, np.float32), (group_sizes, np.int32)]
    operands = [x, *[np.asarray([] if a is None else a, dtype) for a, dtype in optional]]
    m = x.shape[0] if rows is None else len(rows)
    depth = x.shape[1] // 2 if attributes.front == SWIGLU else x.shape[1]
    results = result_types(target, m, depth, len(operands[4]), attributes)
    run = compiled(target, attributes, tuple(results))
    with jax.default_device(device):
        poison = jax.block_until_ready(poisoned(tuple(results))())
    places = [array.unsafe_buffer_pointer() for array in poison]
    actual = run(jax.device_put(operands, device), poison)
    assert [array.unsafe_buffer_pointer() for array in actual] == places
    return jax.device_get(actual)


def assert_platforms_agree(target, x, attributes, **operands):
    want = on(jax.devices("cpu")[0], target, x, attributes, **operands)
    actual = on(gpus()[0], target, x, attributes, **operands)
    assert_same_bytes(actual, want)


every_call = pytest.mark.parametrize("target", ["quantize", "quantize_tiled", "quantize_expanded"])
every_front = pytest.mark.parametrize("front", [NONE, SWIGLU, RMSNORM])


def matrix(kind: str, dtype: str, n: int = 200_000) -> np.ndarray:
    x = inputs.make(kind, dtype, n)
    return x.reshape(-1, x.shape[-1])


def random(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Rows of very different sizes, with outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, shape) * 2.0 ** rng.integers(-20, 20, (shape[0], 1))
    return x.astype(inputs.DTYPES[dtype])


def random_weight(depth: int) -> np.ndarray:
    return np.random.default_rng(depth).standard_normal(depth, np.float32)


# --- Values and options ---


@every_option
@every_dtype
@every_class
@every_call
def test_input_classes(target, name, dtype, options):
    x = inputs.make(name, dtype, 200_000)
    rows_per_scale = 1 if options.scope == "row" else x.shape[1]
    amax = options.amax(x)
    assert_platforms_agree(
        target,
        x.reshape(-1, x.shape[-1]),
        Attributes(
            rows_per_scale=rows_per_scale,
            pow2_scale=options.pow2_scale,
            four_over_six=options.four_over_six,
        ),
        amax=None if amax is None else amax.reshape(-1),
    )


@pytest.mark.parametrize("switches", list(itertools.product([False, True], repeat=3)), ids=str)
@pytest.mark.parametrize("scope", ["row", "tensor"])
@every_dtype
@every_front
@every_call
def test_every_combination_of_options(target, front, dtype, scope, switches):
    options = Options(scope, *switches)
    x = np.concatenate([inputs.make(kind, dtype, 8192) for kind in inputs.CLASSES])
    amax = options.amax(x[..., : x.shape[-1] // 2] if front == SWIGLU else x)
    assert_platforms_agree(
        target,
        x.reshape(-1, x.shape[-1]),
        Attributes(
            front,
            rows_per_scale=1 if scope == "row" else x.shape[1],
            pow2_scale=options.pow2_scale,
            four_over_six=options.four_over_six,
        ),
        weight=random_weight(x.shape[-1]) if front == RMSNORM else None,
        amax=None if amax is None else amax.reshape(-1),
    )


@every_dtype
@every_class
@pytest.mark.parametrize("front", [SWIGLU, RMSNORM])
@pytest.mark.parametrize("eps", [1e-6, 0.0, 1e-30])
def test_fronts_of_input_classes(front, name, dtype, eps):
    if front == SWIGLU and eps != 0.0:
        pytest.skip("SwiGLU has no eps")
    x = matrix(name, dtype)
    weight = random_weight(x.shape[1]) if front == RMSNORM else None
    assert_platforms_agree("quantize", x, Attributes(front, eps), weight=weight)


@pytest.mark.parametrize("up", [1.0, -3.140625, 2.0**-100, 2.0**100])
def test_swiglu_of_every_bf16_gate(up):
    """One value a row, so that the row's scale shows all of its bits."""
    gates = np.arange(2**16, dtype=np.uint16).view(inputs.DTYPES["bfloat16"])
    x = np.zeros((len(gates), 32), inputs.DTYPES["bfloat16"])
    x[:, 5] = gates
    x[:, 16 + 5] = up
    assert_platforms_agree("quantize", x, Attributes(SWIGLU))


def test_swiglu_of_fp32_gates():
    rng = np.random.default_rng(0)
    gates = np.concatenate(
        [
            rng.integers(0, 2**32, 2**17, np.uint32).view(np.float32),
            rng.uniform(-110, 110, 2**17).astype(np.float32),
        ]
    )
    x = np.zeros((len(gates), 32), np.float32)
    x[:, 5] = gates
    x[:, 16 + 5] = rng.standard_normal(len(gates))
    assert_platforms_agree("quantize", x, Attributes(SWIGLU))


@every_dtype
def test_every_block_scale_of_many_rows(dtype):
    """Each e4m3 number as a block scale under 512 row scales, values all over the codes."""
    rng = np.random.default_rng(0)
    numbers = np.concatenate([[448.0], inputs.E4M3_NUMBERS, [0.0]])
    x = rng.uniform(-6, 6, (512, len(numbers), 16)) * numbers[:, None]
    x[..., 3] = 6 * numbers
    x = x.reshape(512, -1) * 2.0 ** rng.uniform(-90, 100, (512, 1))
    for target in ("quantize", "quantize_expanded"):
        assert_platforms_agree(target, x.astype(inputs.DTYPES[dtype]), Attributes())


def test_scales_of_every_mantissa():
    """All mantissas of a given amax, under every third exponent in turn."""
    mantissa = np.arange(2**23, dtype=np.uint32)
    exponent = 1 + 3 * mantissa % 254
    amax = (exponent << 23 | mantissa).astype(np.uint32).view(np.float32)
    x = np.zeros((len(amax), 16), inputs.DTYPES["bfloat16"])
    assert_platforms_agree("quantize", x, Attributes(), amax=amax)


# --- Shapes ---


@pytest.mark.parametrize("depth", [16, 48, 64, 96, 1040, 2048, 6144, 9728, 40000])
@pytest.mark.parametrize("m", [1, 2, 7, 128, 129, 300])
@every_dtype
@every_call
def test_shapes(target, dtype, m, depth):
    assert_platforms_agree(target, random(m, (m, depth), dtype), Attributes())


@pytest.mark.parametrize("depth", [16, 48, 1040, 2048, 9728, 40000, 70000])
@pytest.mark.parametrize("m", [1, 6, 65])
@every_dtype
@every_front
@pytest.mark.parametrize("scope", ["row", "tensor"])
def test_shapes_of_fronts(front, dtype, m, depth, scope):
    x = random(m, (m, 2 * depth if front == SWIGLU else depth), dtype)
    weight = random_weight(depth) if front == RMSNORM else None
    attributes = Attributes(front, rows_per_scale=1 if scope == "row" else m)
    assert_platforms_agree("quantize", x, attributes, weight=weight)


@every_call
@every_front
def test_no_rows(target, front):
    x = np.zeros((0, 64), np.float32)
    weight = random_weight(64) if front == RMSNORM else None
    assert_platforms_agree(target, x, Attributes(front), weight=weight)


@every_dtype
@pytest.mark.parametrize("four_over_six", [False, True])
def test_a_scale_for_each_expert(dtype, four_over_six):
    """Weights [G, N, K] of very different sizes."""
    groups, n, depth = 5, 96, 2048
    x = random(0, (groups * n, depth), dtype)
    x[3 * n : 4 * n] = 0
    x[4 * n + 1, 5] = np.nan
    attributes = Attributes(rows_per_scale=n, four_over_six=four_over_six)
    assert_platforms_agree("quantize", x, attributes)
    assert_platforms_agree("quantize_expanded", x, attributes)


# --- Gather and groups ---

GROUPS = {
    "ragged": [130, 0, 1, 128, 3],
    "empty": [0, 0, 0],
    "one": [77],
    "many": [(7 * g) % 5 for g in range(100)],
    "all": [100, 200],
}


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("gather", [False, True])
@every_front
@every_dtype
@every_call
def test_gather_and_groups(target, dtype, front, gather, sizes):
    m, depth = 300, 80
    rng = np.random.default_rng(1)
    x = random(2, (m, 2 * depth if front == SWIGLU else depth), dtype)
    weight = random_weight(depth) if front == RMSNORM else None
    rows = None
    if gather:
        x = x[:50]
        rows = rng.integers(-3, 53, m)
        rows[5:8] = [2**31 - 1, -(2**31), 50]
    else:
        x[sum(sizes) :] = np.nan  # rows that no group has
    attributes = Attributes(front)
    assert_platforms_agree(target, x, attributes, weight=weight, rows=rows, group_sizes=sizes)
    attributes = replace(attributes, rows_per_scale=100)
    assert_platforms_agree(target, x, attributes, weight=weight, rows=rows, group_sizes=sizes)


@every_call
def test_given_amax_with_groups_and_gather(target):
    x = random(3, (40, 2048), "bfloat16")
    rng = np.random.default_rng(4)
    rows = rng.integers(-1, 41, 64)
    amax = np.abs(rng.standard_normal(64, np.float32))
    amax[::5] = np.nan
    assert_platforms_agree(target, x, Attributes(), rows=rows, amax=amax, group_sizes=[30, 20])


@pytest.mark.parametrize(
    ("sizes", "counts_as"),
    [([-5, 40], [0, 40]), ([20, 2**31 - 1, 2**31 - 1], [20, 44, 0]), ([2**31 - 1] * 3, [64, 0, 0])],
)
@every_call
def test_group_sizes_that_are_not_legal_stay_inside(target, sizes, counts_as):
    x = random(5, (64, 96), "bfloat16")
    want = on(jax.devices("cpu")[0], target, x, Attributes(), group_sizes=counts_as)
    actual = on(gpus()[0], target, x, Attributes(), group_sizes=sizes)
    assert_same_bytes(actual, want)
