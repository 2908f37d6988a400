"""Named classes of inputs that a quantizer is tried on.

`make(name, dtype)` gives at least `n` values (a million by default) as [4, rows, 512]: four
matrices, so that a scale by matrix meets several, and so that one NaN spoils only one of them.
Each class is deterministic.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
WIDTH = 512
BLOCKS = WIDTH // 16

# Halfway between neighbouring e2m1 numbers, and every positive e4m3 number with its midpoints.
E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
E2M1_NUMBERS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3_NUMBERS = np.array(
    [m * 2.0**-9 for m in range(1, 8)]
    + [(8 + m) * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8)][:-1]
)
E4M3_MIDPOINTS = (E4M3_NUMBERS[1:] + E4M3_NUMBERS[:-1]) / 2

Generator = np.random.Generator
Maker = Callable[[Generator, int, np.dtype], np.ndarray]


def _signs(rng: Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice(np.array([-1.0, 1.0]), shape)


def _row_scale(rng: Generator, rows: int) -> np.ndarray:
    """A power of two for each row, so that exactness is kept but exponents vary."""
    return 2.0 ** rng.integers(-40, 41, (rows, 1, 1))


def _nudged(rng: Generator, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A third of the values moved up, and a third down, by one place of `dtype`."""
    unsigned = np.uint16 if dtype.itemsize == 2 else np.uint32
    bits = x.astype(dtype).view(unsigned)
    step = rng.integers(-1, 2, x.shape)
    step[(bits & (2 ** (8 * dtype.itemsize - 1) - 1)) == 0] = 0
    return (bits + step).astype(unsigned).view(dtype)


def _normal(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    return rng.standard_normal((rows, WIDTH), np.float32)


def _heavy_tailed(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    return rng.standard_t(1.2, (rows, WIDTH)) * 1e-2


def _e2m1_midpoints(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    """Blocks whose scale is an e4m3 number by construction, values on midpoints times it."""
    sf = rng.choice(E4M3_NUMBERS, (rows, BLOCKS, 1))
    sf[:, 0] = 448.0  # the row's encode becomes a power of two
    numbers = np.concatenate([E2M1_MIDPOINTS, E2M1_MIDPOINTS, E2M1_NUMBERS])
    x = rng.choice(numbers, (rows, BLOCKS, 16)) * sf * _signs(rng, (rows, BLOCKS, 16))
    scale = _row_scale(rng, rows)
    x = _nudged(rng, x * scale, dtype).astype(np.float64)
    x[..., 7:8] = 6.0 * sf * scale
    return x.reshape(rows, WIDTH)


def _e4m3_midpoints(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    """Blocks whose largest magnitude puts the block scale on, or beside, an e4m3 midpoint."""
    base = rng.choice(np.concatenate([E4M3_MIDPOINTS, E4M3_NUMBERS]), (rows, BLOCKS, 1))
    base[:, 0] = 448.0
    scale = _row_scale(rng, rows)
    x = rng.uniform(-5.9, 5.9, (rows, BLOCKS, 16)) * base * scale
    largest = 6.0 * base * scale * _signs(rng, base.shape)
    x[..., 3:4] = _nudged(rng, largest, dtype)
    x[:, 0, 3] = largest[:, 0, 0]
    return x.reshape(rows, WIDTH)


def _near_e4m3_subnormals(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    """Block scales from far below e4m3's smallest subnormal to just above its smallest normal."""
    base = 2.0 ** rng.uniform(-13.0, -4.0, (rows, BLOCKS, 1))
    base[:, 0] = 448.0
    x = rng.uniform(-6.0, 6.0, (rows, BLOCKS, 16)) * base * _row_scale(rng, rows)
    return x.reshape(rows, WIDTH)


def _zero(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    return np.zeros((rows, WIDTH))


def _negative_zero(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    """Minus zero alone, in whole blocks beside others, and among other values."""
    x = rng.standard_normal((rows, BLOCKS, 16))
    x[rng.random(x.shape) < 0.3] = -0.0
    x[rng.random((rows, BLOCKS)) < 0.3] = -0.0
    x[rows // 2 :] = -0.0
    return x.reshape(rows, WIDTH)


def _fp32_subnormal(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    """Subnormals alone, beside the smallest normal numbers, and beside ordinary values."""
    x = rng.uniform(-(2.0**-126), 2.0**-126, (rows, WIDTH))
    small = rng.uniform(-(2.0**-124), 2.0**-124, (rows, WIDTH))
    ordinary = rng.standard_normal((rows, WIDTH))
    kind = np.arange(rows)[:, None] % 4
    mixed = rng.random((rows, WIDTH)) < 0.5
    x = np.where((kind == 1) & mixed, small, x)
    x = np.where((kind == 2) & mixed, ordinary, x)
    return np.where((kind == 3) & mixed, small * 2.0 ** rng.uniform(0, 90, (rows, 1)), x)


def _largest_finite(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    """Rows of nothing but the largest finite number, and rows that mix it with others."""
    largest = float(ml_dtypes.finfo(dtype).max)
    mixed = rng.standard_normal((rows, WIDTH)) * 10.0 ** rng.uniform(0, 37, (rows, 1))
    mixed = np.clip(mixed, -largest, largest)
    full = _signs(rng, (rows, WIDTH)) * largest
    share = np.arange(rows)[:, None] % 3 / 2  # none, half or all of the row
    return np.where(rng.random((rows, WIDTH)) < share, full, mixed)


def _one_nan(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    x = _normal(rng, rows, dtype)
    x[rows // 3, 77] = np.nan
    return x


def _one_infinity(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    x = _normal(rng, rows, dtype)
    x[rows // 3, 77] = -np.inf
    return x


def _any_finite_bits(rng: Generator, rows: int, dtype: np.dtype) -> np.ndarray:
    """Uniform bit patterns: every exponent, in the same row."""
    unsigned = np.uint16 if dtype.itemsize == 2 else np.uint32
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), (rows, WIDTH)).astype(unsigned)
    exponent = (bits >> (8 * dtype.itemsize - 9)) & 0xFF
    return np.where(exponent == 0xFF, np.zeros((), dtype), bits.view(dtype))


CLASSES: dict[str, Maker] = {
    "normal": _normal,
    "heavy_tailed": _heavy_tailed,
    "e2m1_midpoints": _e2m1_midpoints,
    "e4m3_midpoints": _e4m3_midpoints,
    "near_e4m3_subnormals": _near_e4m3_subnormals,
    "zero": _zero,
    "negative_zero": _negative_zero,
    "fp32_subnormal": _fp32_subnormal,
    "largest_finite": _largest_finite,
    "one_nan": _one_nan,
    "one_infinity": _one_infinity,
    "any_finite_bits": _any_finite_bits,
}


def make(name: str, dtype: str, n: int = 1_000_000) -> np.ndarray:
    """At least `n` values of a class as [4, rows, 512] of "float32" or "bfloat16"."""
    rng = np.random.default_rng([sorted(CLASSES).index(name), len(dtype)])
    rows = -(-n // WIDTH // 4) * 4
    kind = DTYPES[dtype]
    x = CLASSES[name](rng, rows, kind)
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(kind).reshape(4, rows // 4, WIDTH)


def make_amax(x: np.ndarray, scope: str) -> np.ndarray:
    """Amaxes a caller might give: true, halved, doubled, and the odd ones (0, subnormal, ...)."""
    magnitude = np.abs(x.astype(np.float32))
    amax = magnitude.max(axis=-1) if scope == "row" else magnitude.max(axis=(-2, -1))
    flat = amax.reshape(-1)
    odd = np.array([0.0, -0.0, 1e-40, -1.0, np.nan, np.inf, -np.inf, 3.0], np.float32)
    with np.errstate(over="ignore"):
        flat[1::4] *= np.float32(0.5)
        flat[2::4] *= np.float32(2)
    flat[3::4] = np.resize(odd, flat[3::4].shape)
    return flat.reshape(amax.shape)
