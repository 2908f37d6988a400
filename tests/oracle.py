"""The numerics of NVFP4 in NumPy: the second authority beside ffi/numerics.h.

Written from the contract and not from the kernels. Floats are taken apart as integers, with
encoders of its own, and every named step is one NumPy float32 operation, so nothing here depends
on a compiler's choice. `x` may be float32 or bfloat16; block scales are handled as their bits.

    encode    = min(2688 / amax, 2^100)               (1 if amax is 0)
    sf        = e4m3(bmax * (encode * (1/6)))         saturating at 448
    block_enc = 1 / (float(sf) * (1 / encode))
    code      = e2m1(x * block_enc)                   saturating at 6
    scale     = 1 / encode
    value     = e2m1(code) * float(sf) * scale

Left out: gradients, and anything about speed beyond being vectorised.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

BLOCK = 16
SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)
SMALLEST_NORMAL = np.uint32(0x00800000)
INFINITY = np.uint32(0x7F800000)
NAN = np.uint32(0x7FC00000)
NAN_BLOCK_SCALE = np.uint8(0x7F)
LARGEST_ENCODE = np.float32(2.0**100)
ONE = np.float32(1)


class Quantized(NamedTuple):
    """A quantised array: packed codes, block scales as bits, fp32 scale by row or matrix."""

    codes: np.ndarray  # uint8[..., K / 2]
    block_scales: np.ndarray  # uint8[..., K / 16]
    scale: np.ndarray  # float32, x.shape[:-1] or x.shape[:-2]


class Product(NamedTuple):
    """A product in fp64, and the same sum over magnitudes, which bounds any fp32 sum's error."""

    value: np.ndarray
    magnitude: np.ndarray


# --- Number formats ---


def float32(x: np.ndarray) -> np.ndarray:
    """A float32 or bfloat16 array as float32; a bfloat16 is the upper half of a float32."""
    x = np.asarray(x, order="C")
    if x.dtype == np.float32:
        return x
    if x.dtype != ml_dtypes.bfloat16:
        raise TypeError(f"x must be float32 or bfloat16, got {x.dtype}")
    return (x.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16: nearest, ties to even, NaN stays NaN."""
    bits = np.asarray(x, np.float32, order="C").view(np.uint32)
    upper, lower = bits >> np.uint32(16), bits & np.uint32(0xFFFF)
    up = (lower > 0x8000) | ((lower == 0x8000) & ((upper & np.uint32(1)) == 1))
    is_nan = (bits & MAGNITUDE) > INFINITY
    rounded = np.where(is_nan, upper | np.uint32(0x40), upper + up)
    return rounded.astype(np.uint16).view(ml_dtypes.bfloat16)


def round_like(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """float32 rounded to the type of `like`."""
    return x if like.dtype == np.float32 else bfloat16(x)


def flush(x: np.ndarray) -> np.ndarray:
    """float32 with every subnormal replaced by the zero of its sign."""
    bits = np.asarray(x, np.float32, order="C").view(np.uint32)
    small = (bits & MAGNITUDE) < SMALLEST_NORMAL
    return np.where(small, bits & SIGN, bits).view(np.float32)


def encode_minifloat(
    magnitude: np.ndarray, exponent_bits: int, mantissa_bits: int, largest_code: int
) -> np.ndarray:
    """The code of the nearest number of a small float format, ties to the even code.

    Args:
        magnitude: bits of nonnegative float32 values, not NaN.
        largest_code: what everything too large, infinity included, becomes.
    """
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = (magnitude >> np.uint32(23)).astype(np.int32)
    mantissa = (magnitude & np.uint32(0x7FFFFF)).astype(np.int32)
    mantissa |= np.where(exponent > 0, 1 << 23, 0).astype(np.int32)
    # Below the smallest normal number the exponent field stays 1 and mantissa bits are lost.
    small_exponent = np.maximum(exponent - 127 + bias, 1)
    dropped = 23 - mantissa_bits + small_exponent - (exponent - 127 + bias)
    dropped = np.minimum(dropped, 25)
    kept = mantissa >> dropped
    rest = mantissa - (kept << dropped)
    half = np.int32(1) << (dropped - 1)
    kept += (rest > half) | ((rest == half) & (kept & 1 == 1))
    # `kept` holds the hidden bit, hence exponent - 1; a carry moves into the exponent by itself.
    code = kept + ((small_exponent - 1) << mantissa_bits)
    return np.minimum(code, largest_code).astype(np.uint8)


def decode_minifloat(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """The values of all nonnegative codes of a small float format."""
    bias = (1 << (exponent_bits - 1)) - 1
    values = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
        values.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    return np.array(values, np.float32)


E2M1_VALUES = decode_minifloat(2, 1)
E2M1_VALUES = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
E4M3_VALUES = decode_minifloat(4, 3)
E4M3_VALUES[0x7F] = np.nan
E4M3_VALUES = np.concatenate([E4M3_VALUES, -E4M3_VALUES])


def encode_e2m1(x: np.ndarray) -> np.ndarray:
    """4-bit codes of float32 values (not NaN), saturating at 6; the sign is bit 3."""
    bits = np.asarray(x, np.float32, order="C").view(np.uint32)
    sign = (bits >> np.uint32(28)).astype(np.uint8) & np.uint8(8)
    return encode_minifloat(bits & MAGNITUDE, 2, 1, largest_code=7) | sign


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """8-bit codes of nonnegative float32 values (not NaN), saturating at 448."""
    bits = np.asarray(x, np.float32, order="C").view(np.uint32)
    return encode_minifloat(bits & MAGNITUDE, 4, 3, largest_code=0x7E)


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))


def unpack(packed: np.ndarray) -> np.ndarray:
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


# --- Quantise and dequantise ---


def _encode_and_scale(amax: np.ndarray, pow2_scale: bool) -> tuple[np.ndarray, np.ndarray]:
    """`amax` is finite, and zero or normal."""
    zero = amax == 0
    encode = np.minimum(np.float32(2688) / np.where(zero, ONE, amax), LARGEST_ENCODE)
    encode = np.where(zero, ONE, encode)
    scale = ONE / encode
    if pow2_scale:
        mantissa, exponent = np.frexp(scale)  # mantissa in [1/2, 1)
        exponent = np.where(mantissa == np.float32(0.5), exponent - 1, exponent)
        scale = np.ldexp(ONE, exponent)
        encode = ONE / scale
    return encode, scale


def _block_codes(x: np.ndarray, sf: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Codes of x[..., blocks, 16] under the block scales sf[..., blocks]."""
    nonzero = sf != 0
    decode = np.where(nonzero, E4M3_VALUES[sf], ONE) * scale
    codes = encode_e2m1(x * (ONE / decode)[..., None])
    return np.where(nonzero[..., None], codes, np.uint8(0))


def _squared_error(u: np.ndarray, codes: np.ndarray, sf: np.ndarray) -> np.ndarray:
    error = u - E2M1_VALUES[codes] * E4M3_VALUES[sf][..., None]
    squares = error * error
    total = squares[..., 0]
    for i in range(1, BLOCK):
        total = total + squares[..., i]
    return total


def quantize(
    x: np.ndarray,
    scope: str = "row",
    pow2_scale: bool = False,
    four_over_six: bool = False,
    amax: np.ndarray | None = None,
) -> Quantized:
    """The contract. x: float32 or bfloat16 [..., K]; amax, where given, has the scale's shape."""
    shape = x.shape
    bits = float32(x).view(np.uint32).reshape(*shape[:-1], shape[-1] // BLOCK, BLOCK)
    magnitude = bits & MAGNITUDE
    magnitude = np.where(magnitude < SMALLEST_NORMAL, np.uint32(0), magnitude)
    block_max = magnitude.max(axis=-1)

    axes = {"row": (-1,), "tensor": (-2, -1)[-x.ndim :]}[scope]
    if amax is None:
        used = block_max.max(axis=axes, initial=0, keepdims=True)
    else:
        given = flush(np.asarray(amax, np.float32)).view(np.uint32)
        negative = given > SIGN  # minus zero is a zero
        used = np.where(negative, NAN, given & MAGNITUDE)
        used = np.expand_dims(used, axes)
    scale_is_nan = used >= INFINITY
    block_is_nan = (block_max >= INFINITY) | scale_is_nan
    amax_f32 = np.where(scale_is_nan, np.uint32(0), used).view(np.float32)

    with np.errstate(all="ignore"):
        encode, scale = _encode_and_scale(amax_f32, pow2_scale)
        values = np.where(block_is_nan[..., None], np.uint32(0), magnitude | (bits & SIGN))
        values = values.view(np.float32)
        bmax = np.where(block_is_nan, np.uint32(0), block_max).view(np.float32)
        base = bmax * (encode * (ONE / np.float32(6)))
        sf = encode_e4m3(base)
        codes = _block_codes(values, sf, scale)
        if four_over_six:
            sf4 = encode_e4m3(np.float32(1.5) * base)
            codes4 = _block_codes(values, sf4, scale)
            u = values * encode[..., None]
            take4 = _squared_error(u, codes4, sf4) < _squared_error(u, codes, sf)
            sf = np.where(take4, sf4, sf)
            codes = np.where(take4[..., None], codes4, codes)

    sf = np.where(block_is_nan, NAN_BLOCK_SCALE, sf)
    scale = np.where(scale_is_nan, NAN, scale.view(np.uint32)).view(np.float32)
    return Quantized(pack(codes.reshape(shape)), sf, scale.squeeze(axes))


def operand(codes: np.ndarray, block_scales: np.ndarray) -> np.ndarray:
    """e2m1(code) * float(sf), in fp64 (exact; six significant bits)."""
    values = E2M1_VALUES[unpack(codes)].astype(np.float64)
    return values * np.repeat(E4M3_VALUES[block_scales].astype(np.float64), BLOCK, axis=-1)


def _by_element(scale: np.ndarray, ndim: int) -> np.ndarray:
    """A scale by row or by matrix, shaped to broadcast over its array."""
    return scale.reshape(scale.shape + (1,) * (ndim - scale.ndim))


def dequantize(q: Quantized) -> np.ndarray:
    """e2m1(code) * float(sf) * scale, in fp64 (exact: 30 significant bits)."""
    values = operand(q.codes, q.block_scales)
    return values * _by_element(q.scale.astype(np.float64), values.ndim)


def dequantize_bfloat16(q: Quantized) -> np.ndarray:
    """The value rounded to fp32 and then to bfloat16, as the dequantised backward operand is."""
    values = operand(q.codes, q.block_scales).astype(np.float32)
    with np.errstate(over="ignore"):
        return bfloat16(values * _by_element(q.scale, values.ndim))


# --- Fused fronts. A float32 step whose result is subnormal gives the zero of its sign. ---


def exp(x: np.ndarray) -> np.ndarray:
    """The polynomial exp of the contract: at most 2 ulp, results below 2^-126 are 0."""
    f = np.float32
    with np.errstate(all="ignore"):
        x = np.where(x > f(89), f(89), np.where(x < f(-104), f(-104), x))
        n = np.rint(x * f(1.44269504088896341))
        r = (x - n * f(0.693359375)) - n * f(-2.12194440e-4)
        p = f(1.9875691500e-4)
        for c in (
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            0.50000001201,
        ):
            p = p * r + f(c)
        p = (p * (r * r) + r) + f(1)
        n = np.where(np.isnan(n), f(0), n).astype(np.int32)
        result = np.ldexp(p, n)
        return np.where(result < f(2.0**-126), f(0), result)


def swiglu(x: np.ndarray) -> np.ndarray:
    """g / (1 + exp(-g)) * u, rounded to x's type. x: [..., 2F], the gate g first."""
    gate, up = np.split(flush(float32(x)), 2, axis=-1)
    with np.errstate(all="ignore"):
        silu = flush(gate / (ONE + exp(-gate)))
        return round_like(flush(silu * up), x)


def row_sum(x: np.ndarray) -> np.ndarray:
    """The sum along the last axis: 32 strided partial sums in order, then a binary tree."""
    partial = np.zeros((*x.shape[:-1], 32), np.float32)
    for start in range(0, x.shape[-1], 32):
        chunk = x[..., start : start + 32]
        partial[..., : chunk.shape[-1]] += chunk
    for stride in (16, 8, 4, 2, 1):
        partial = partial[..., :stride] + partial[..., stride : 2 * stride]
    return partial[..., 0]


def rmsnorm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x * (1 / sqrt(mean(x^2) + eps)) * weight, rounded to x's type. weight: [K]."""
    values, weight = flush(float32(x)), flush(float32(weight))
    with np.errstate(all="ignore"):
        mean = row_sum(flush(values * values)) / np.float32(x.shape[-1])
        inverse_rms = ONE / np.sqrt(mean + np.float32(eps))
        return round_like(flush(flush(values * inverse_rms[..., None]) * weight), x)


# --- Block scales in the tensor cores' layout ---


def tile_scales(block_scales: np.ndarray) -> np.ndarray:
    """Scales [R, C] as the flat bytes of tiles of 128 rows by 4 columns, padded with zeros."""
    rows, columns = block_scales.shape
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    r, c = np.arange(rows)[:, None], np.arange(columns)[None, :]
    tile = (r // 128) * column_tiles + c // 4
    tiled = np.zeros(row_tiles * column_tiles * 512, np.uint8)
    tiled[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = block_scales
    return tiled


# --- Products ---


def product(a: np.ndarray, b: np.ndarray, scale_a=1.0, scale_b=1.0) -> Product:
    """a [M, K] times b [N, K] transposed, in fp64, times scale_b ([] or [N]) and scale_a ([M])."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    scales = np.asarray(scale_b, np.float64) * np.asarray(scale_a, np.float64)[..., None]
    with np.errstate(invalid="ignore"):
        return Product(a @ b.T * scales, np.abs(a) @ np.abs(b).T * np.abs(scales))


def quantized_product(a: Quantized, b: Quantized) -> Product:
    """The product of two quantised matrices, exact but for fp64 rounding."""
    return product(operand(*a[:2]), operand(*b[:2]), a.scale, b.scale)


def unquantized_product(a: np.ndarray, b: np.ndarray) -> Product:
    """The product of two float32 or bfloat16 matrices; their subnormals count as zero."""
    return product(flush(float32(a)), flush(float32(b)))
