"""The numerics of NVFP4 in plain jnp: what the custom calls compute, on any platform.

    encode    = min(2688 / amax, 2^100)               (1 if amax is 0)
    sf        = e4m3(bmax * (encode * (1/6)))         saturating at 448
    block_enc = 1 / (float(sf) * (1 / encode))
    code      = e2m1(x * block_enc)                   saturating at 6
    scale     = 1 / encode
    value     = e2m1(code) * float(sf) * scale

amax is the largest magnitude of a row or matrix, bmax that of a block of 16. The formats are those
of NVIDIA's NVFP4 (OCP e2m1 elements, OCP e4m3 block scales) with an fp32 scale above them.

Every step is one fp32 operation rounded to nearest even. XLA may fuse a multiplication into the
addition that follows, replace a division or move it through another; `_exactly` stands where that
would change bits. On the CPU the results are those of the custom calls byte for byte; where the
division is not IEEE (XLA on GPUs) a scale may differ in its last place.

Left out: derivatives, argument checks and speed. Functions return plain arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp4.format import BLOCK, E2M1_MAX, E4M3_MAX

Array = jax.Array

_SMALLEST_NORMAL = np.float32(2.0**-126)
_LARGEST_ENCODE = np.float32(2.0**100)
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NAN_BLOCK_SCALE = np.uint8(0x7F)
_ROW_PARTIALS = 32


def _flush(x: Array) -> Array:
    """x as fp32 with subnormals replaced by the zero of their sign."""
    values = x.astype(jnp.float32)
    if x.dtype == jnp.bfloat16:
        # XLA may have dropped the rounding that made x; this one it keeps.
        values = lax.reduce_precision(values, exponent_bits=8, mantissa_bits=7)
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    subnormal = (bits & np.uint32(0x7F800000)) == 0
    bits = jnp.where(subnormal, bits & np.uint32(0x80000000), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


# What `_flush` selects is opaque to XLA's and LLVM's rewriting of floating-point arithmetic, so a
# result that passes through it has been rounded.
_exactly = _flush


def _round_to(x: Array, dtype: jnp.dtype) -> Array:
    """fp32 rounded to `dtype`; the rounding to bf16 cannot be dropped by XLA."""
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def _e2m1_code(x: Array) -> Array:
    """4-bit codes of fp32 values; ties go to the even code, the sign is bit 3."""
    a = jnp.abs(x)
    above = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0]
    code = sum((c.astype(jnp.uint8) for c in above), jnp.zeros(x.shape, jnp.uint8))
    return code | (jnp.signbit(x).astype(jnp.uint8) << np.uint8(3))


def _e2m1_value(code: Array) -> Array:
    magnitude = jnp.asarray(_E2M1)[(code & np.uint8(7)).astype(jnp.int32)]
    return jnp.where(code >= 8, -magnitude, magnitude)


def _e4m3(x: Array) -> Array:
    """Nonnegative fp32 rounded to e4m3, saturating (the cast alone makes NaN of 465 and more)."""
    return jnp.minimum(x, np.float32(E4M3_MAX)).astype(jnp.float8_e4m3fn)


def _blocks(x: Array) -> Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def _largest_magnitude(x: Array, axes: tuple[int, ...]) -> Array:
    """max |x| along axes, which are kept; NaN if there is one, which jnp.max may lose on the CPU.

    As integers, magnitudes have their order, infinity is above them and NaN above infinity.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(0x7FFFFFFF)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True, initial=0), jnp.float32)


def _encode_and_scale(amax: Array, pow2_scale: bool) -> tuple[Array, Array]:
    encode = jnp.minimum(np.float32(E2M1_MAX * E4M3_MAX) / amax, _LARGEST_ENCODE)
    encode = _exactly(jnp.where(amax == 0, np.float32(1), encode))
    scale = _exactly(np.float32(1) / encode)
    if pow2_scale:
        bits = lax.bitcast_convert_type(scale, jnp.uint32)
        bits = (bits + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)
        scale = lax.bitcast_convert_type(bits, jnp.float32)
        encode = _exactly(np.float32(1) / scale)
    return encode, scale


def _block_codes(x: Array, sf: Array, scale: Array) -> Array:
    """Codes of x[..., blocks, 16] under the e4m3 block scales sf[..., blocks]."""
    sf_f32 = sf.astype(jnp.float32)
    block_encode = _exactly(np.float32(1) / _exactly(sf_f32 * scale))
    codes = _e2m1_code(_exactly(x * block_encode[..., None]))
    return jnp.where((sf_f32 == 0)[..., None], np.uint8(0), codes)


def _squared_error(u: Array, codes: Array, sf: Array) -> Array:
    error = _exactly(u - _e2m1_value(codes) * sf.astype(jnp.float32)[..., None])
    squares = _exactly(error * error)
    total = squares[..., 0]
    for i in range(1, BLOCK):
        total = total + squares[..., i]
    return total


def quantize(
    x: Array,
    scope: str = "row",
    pow2_scale: bool = False,
    four_over_six: bool = False,
    amax: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Quantise x to NVFP4.

    Args:
        x: bf16 or fp32 [..., K], K a multiple of 16. Subnormals count as zero.
        scope: "row", one fp32 scale for each row; "tensor", one for each matrix.
        pow2_scale: round the scale up to a power of two.
        four_over_six: give each block the better of two scales, for a largest code of 6 or of 4.
        amax: fp32 of the scale's shape, used in place of the largest magnitudes of x.

    Returns:
        codes uint8 [..., K/2] (the even index in the low nibble), block scales float8_e4m3fn
        [..., K/16], scale fp32: x.shape[:-1], or x.shape[:-2] for scope "tensor".
    """
    x_blocks = _blocks(_flush(x))
    block_max = _largest_magnitude(x_blocks, axes=(-1,)).squeeze(-1)
    axes = (-1,) if scope == "row" else (-2, -1)[-x.ndim :]
    if amax is None:
        used = _largest_magnitude(block_max, axes)
    else:
        used = jnp.expand_dims(_flush(amax), axes)
        used = jnp.where(used < 0, np.float32(np.nan), used)
    scale_is_nan = ~jnp.isfinite(used)
    block_is_nan = ~jnp.isfinite(block_max) | scale_is_nan

    encode, scale = _encode_and_scale(jnp.where(scale_is_nan, np.float32(0), used), pow2_scale)
    values = jnp.where(block_is_nan[..., None], np.float32(0), x_blocks)
    block_max = jnp.where(block_is_nan, np.float32(0), block_max)
    base = _exactly(block_max * _exactly(encode * np.float32(1 / E2M1_MAX)))
    sf = _e4m3(base)
    codes = _block_codes(values, sf, scale)
    if four_over_six:
        sf4 = _e4m3(np.float32(1.5) * base)
        codes4 = _block_codes(values, sf4, scale)
        u = _exactly(values * encode[..., None])
        take4 = _squared_error(u, codes4, sf4) < _squared_error(u, codes, sf)
        sf = jnp.where(take4, sf4, sf)
        codes = jnp.where(take4[..., None], codes4, codes)

    sf_bits = lax.bitcast_convert_type(sf, jnp.uint8)
    sf_bits = jnp.where(block_is_nan, _NAN_BLOCK_SCALE, sf_bits)
    packed = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return (
        packed.reshape(*x.shape[:-1], x.shape[-1] // 2),
        lax.bitcast_convert_type(sf_bits, jnp.float8_e4m3fn),
        jnp.where(scale_is_nan, np.float32(np.nan), scale).squeeze(axes),
    )


def operand(codes: Array, block_scales: Array) -> Array:
    """e2m1(code) * float(sf) as bf16 [..., K]: exact, for it has six significant bits."""
    unpacked = jnp.stack([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
    values = _e2m1_value(unpacked.reshape(*block_scales.shape, BLOCK))
    values = values * block_scales.astype(jnp.float32)[..., None]
    return values.reshape(*codes.shape[:-1], 2 * codes.shape[-1]).astype(jnp.bfloat16)


def dequantize(
    codes: Array, block_scales: Array, scale: Array, dtype: jnp.dtype = jnp.bfloat16
) -> Array:
    """e2m1(code) * float(sf) * scale as `dtype` [..., K]."""
    values = operand(codes, block_scales).astype(jnp.float32)
    scale = scale.reshape(scale.shape + (1,) * (values.ndim - scale.ndim))
    return _round_to(values * scale, dtype)


# --- Fused fronts ---


def exp(x: Array) -> Array:
    """exp of fp32 by one polynomial on every platform: at most 2 ulp, below 2^-126 zero."""

    def f(value: float) -> np.float32:
        return np.float32(value)

    x = jnp.where(x > f(89), f(89), jnp.where(x < f(-104), f(-104), x))
    n = lax.round(_exactly(x * f(1.44269504088896341)), lax.RoundingMethod.TO_NEAREST_EVEN)
    # ln 2 in two parts: n times the first is exact.
    r = _exactly(x - n * f(0.693359375)) - _exactly(n * f(-2.12194440e-4))
    p = jnp.full_like(x, f(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _exactly(p * r) + f(c)
    p = (_exactly(p * _exactly(r * r)) + r) + f(1)
    # 2^n in two factors, because n reaches 128.
    exponent = jnp.where(jnp.isnan(n), f(0), n).astype(jnp.int32)
    half = exponent >> 1
    return _flush(p * _power_of_two(half) * _power_of_two(exponent - half))


def _power_of_two(n: Array) -> Array:
    return lax.bitcast_convert_type((n + np.int32(127)) << np.int32(23), jnp.float32)


def swiglu(x: Array) -> Array:
    """g / (1 + exp(-g)) * u in x's dtype [..., F], for x [..., 2F] with the gate g first."""
    gate, up = jnp.split(_flush(x), 2, axis=-1)
    silu = _exactly(gate / _exactly(np.float32(1) + exp(-gate)))
    return _round_to(_flush(silu * up), x.dtype)


def _row_sum(x: Array) -> Array:
    """The sum along the last axis: 32 strided partial sums in order, then a binary tree."""
    width = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -width % _ROW_PARTIALS)]
    chunks = jnp.pad(x, padding).reshape(*x.shape[:-1], -1, _ROW_PARTIALS)
    chunks = jnp.moveaxis(chunks, -2, 0)

    def add(partial: Array, chunk: Array) -> tuple[Array, None]:
        return partial + chunk, None

    partial, _ = lax.scan(add, jnp.zeros_like(chunks[0]), chunks)
    for stride in (16, 8, 4, 2, 1):
        partial = partial[..., :stride] + partial[..., stride:]
    return partial[..., 0]


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    """x * (1 / sqrt(mean(x^2) + eps)) * weight in x's dtype [..., K]; weight [K]."""
    values, weight = _flush(x), _flush(weight)
    total = _row_sum(_exactly(values * values))
    # By a constant XLA would not divide: it would multiply by the rounded reciprocal.
    width = jnp.where(jnp.isfinite(total), np.float32(x.shape[-1]), np.float32(1))
    mean = _exactly(total / width)
    root = _exactly(jnp.sqrt(_exactly(mean + np.float32(eps))))
    normed = _exactly(values * _exactly(np.float32(1) / root)[..., None])
    weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
    return _round_to(_flush(normed * weight), x.dtype)


# --- Products: fp32 sums of exact operands, then the weight's scale, then the row's ---


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(
        subscripts,
        _flush(a),
        _flush(b),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _scaled(y: Array, scale_a: Array | None, scale_b: Array | None) -> Array:
    if scale_b is not None:
        y = y * scale_b
    if scale_a is not None:
        y = y * (scale_a[..., None] if scale_a.ndim else scale_a)
    return y


def product(
    a: Array,
    b: Array,
    scale_a: Array | None = None,
    scale_b: Array | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
) -> Array:
    """a [M, K] times b [N, K] transposed, [M, N].

    Args:
        a, b: operands as bf16 or fp32, both multiplied as fp32.
        scale_a: fp32 [M] or a scalar.
        scale_b: fp32 [N] or a scalar, multiplied first.
    """
    if scale_b is not None and scale_b.ndim:
        scale_b = scale_b[None, :]
    return _round_to(_scaled(_dot("mk,nk->mn", a, b), scale_a, scale_b), out_dtype)


def _group_of_row(group_sizes: Array, rows: int) -> Array:
    """The group of each row, as if rows past the last group belonged to one more."""
    ends = jnp.cumsum(group_sizes)
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=ends.dtype), side="right")


def grouped_product(
    a: Array,
    b: Array,
    group_sizes: Array,
    scale_a: Array | None = None,
    scale_b: Array | None = None,
    out_dtype: jnp.dtype = jnp.bfloat16,
) -> Array:
    """Each row of a [M, K] times its own group's b [G, N, K] transposed, [M, N].

    Multiplies every row by every group and keeps one: G times the work of a kernel. Rows past
    sum(group_sizes) come out zero, whatever they hold.

    Args:
        group_sizes: int32 [G], rows are sorted by group.
        scale_a: fp32 [M] or a scalar.
        scale_b: fp32 [G] or [G, N], multiplied first.
    """
    rows, groups = a.shape[0], b.shape[0]
    group = _group_of_row(group_sizes, rows)
    own = jnp.minimum(group, groups - 1)
    y = _dot("mk,gnk->mgn", a, b)[jnp.arange(rows), own]
    if scale_b is not None:
        scale_b = scale_b[own] if scale_b.ndim == 2 else scale_b[own][:, None]
    y = _round_to(_scaled(y, scale_a, scale_b), out_dtype)
    return jnp.where((group < groups)[:, None], y, jnp.zeros((), y.dtype))


def grouped_outer_product(
    a: Array, b: Array, group_sizes: Array, out_dtype: jnp.dtype = jnp.float32
) -> Array:
    """For each group the sum of its rows' outer products: a [M, N], b [M, K] -> [G, N, K].

    The gradient of `grouped_product` to its weights. Empty groups are zero; rows past
    sum(group_sizes) add nothing, whatever they hold.
    """
    groups = group_sizes.shape[0]
    group = _group_of_row(group_sizes, a.shape[0])
    mine = (group[None, :] == jnp.arange(groups, dtype=group.dtype)[:, None])[..., None]
    a_by_group = jnp.where(mine, a[None], jnp.zeros((), a.dtype))
    b_by_group = jnp.where(mine, b[None], jnp.zeros((), b.dtype))
    return _round_to(_dot("gmn,gmk->gnk", a_by_group, b_by_group), out_dtype)
