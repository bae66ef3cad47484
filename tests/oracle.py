"""The formats once more, one number at a time: tables, thresholds and Python floats, sharing nothing with the package.

A float32 operation is the double-precision one rounded to float32: for + - * / of float32 operands, double has enough
bits that rounding twice is rounding once.
"""

import bisect
import math
import struct

INF, NAN = math.inf, math.nan
FLT_MAX = struct.unpack("f", b"\xff\xff\x7f\x7f")[0]
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Upper bound of what still rounds to magnitude i; the bound itself belongs to the even one of its neighbours.
_UPPER = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
E4M3 = [
    (m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8) if e * 8 + m < 127
]
E4M3_NAN = 127


def f32(x):
    """x rounded to float32."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(INF, x)


def div(a, b):
    """IEEE division: no ZeroDivisionError."""
    if b == 0:
        return NAN if a == 0 or math.isnan(a) else math.copysign(INF, a) * math.copysign(1, b)
    return f32(a / b)


def smaller(a, b):
    """The minimum that keeps NaN."""
    return NAN if math.isnan(a) or math.isnan(b) else min(a, b)


def largest_magnitude(values):
    found = 0.0
    for value in values:
        found = NAN if math.isnan(value) or math.isnan(found) else max(found, abs(value))
    return found


def e2m1(v):
    """The nearest code, ties to the even one; NaN, for any code, if v is NaN."""
    if math.isnan(v):
        return NAN
    index = 0
    while index < 7 and (abs(v) > _UPPER[index] or (abs(v) == _UPPER[index] and index % 2 == 1)):
        index += 1
    return index + _sign(v)


def e2m1_stochastic(v, noise):
    """The code whose index is the whole part of g + noise / 2^16, rounded to a multiple of 2^-16, ties to even.

    g interpolates the indices between the magnitudes. Double precision is enough: a sum just beside a tie has at most
    16 + 37 bits.
    """
    if math.isnan(v):
        return NAN
    if abs(v) >= 6:
        return 7 + _sign(v)
    below = bisect.bisect_right(MAGNITUDES, abs(v)) - 1
    g = below + (abs(v) - MAGNITUDES[below]) / (MAGNITUDES[below + 1] - MAGNITUDES[below])
    return (round(g * 2**16 + noise) >> 16) + _sign(v)


def _sign(v):
    """Bit 3 of a code; -0.0 has it too."""
    return 8 if math.copysign(1, v) < 0 else 0


def e2m1_value(code):
    if math.isnan(code):
        return NAN
    return -MAGNITUDES[code - 8] if code >= 8 else MAGNITUDES[code]


def e4m3(x):
    """The byte of the nearest E4M3 value of 0 <= x <= 448, ties to the even byte; NaN to 127."""
    if math.isnan(x):
        return E4M3_NAN
    above = bisect.bisect_left(E4M3, x)
    if above == len(E4M3) or E4M3[above] == x or above == 0:
        return min(above, len(E4M3) - 1)
    low, high = x - E4M3[above - 1], E4M3[above] - x
    return above if high < low or (high == low and above % 2 == 0) else above - 1


def e4m3_value(byte):
    return NAN if byte == E4M3_NAN else E4M3[byte]


class Nvfp4:
    """codes, scales, amax and values of a matrix (a list of rows).

    A code is NaN where it may be any. noise: rows of it make the codes stochastic.
    """

    def __init__(self, rows, block=(1, 16), noise=None):
        self.amax = largest_magnitude(x for row in rows for x in row)
        s_enc = smaller(div(2688.0, self.amax), FLT_MAX)
        if self.amax == 0 or s_enc == 0:
            s_enc = 1.0
        s_dec, mult = div(1.0, s_enc), f32(s_enc * f32(1 / 6))
        self.scales = [[e4m3(smaller(f32(b * mult), 448.0)) for b in row] for row in _block_amax(rows, block)]
        self.encode = [[smaller(div(1.0, f32(e4m3_value(s) * s_dec)), FLT_MAX) for s in row] for row in self.scales]
        self.scaled = [[f32(x * self.encode[r][c // 16]) for c, x in enumerate(row)] for r, row in enumerate(rows)]
        self.codes = codes_of(self.scaled, noise)
        tensor_scale = f32(self.amax / 2688.0)
        self.values = [
            [f32(e2m1_value(code) * e4m3_value(self.scales[r][c // 16]) * tensor_scale) for c, code in enumerate(row)]
            for r, row in enumerate(self.codes)
        ]


def _block_amax(rows, block):
    by_row = [[largest_magnitude(row[i : i + 16]) for i in range(0, len(row), 16)] for row in rows]
    if block[0] == 1:
        return by_row
    tiles = [by_row[i // 16 * 16 : i // 16 * 16 + 16] for i in range(len(by_row))]
    return [[largest_magnitude(column) for column in zip(*tile, strict=True)] for tile in tiles]


class Mxfp4:
    """codes, scale bytes and values of a matrix (a list of rows); codes and noise as above."""

    def __init__(self, rows, noise=None):
        self.bytes = [[_ue8m0(largest_magnitude(row[i : i + 32])) for i in range(0, len(row), 32)] for row in rows]
        powers = [[NAN if s == 255 else 2.0 ** (s - 127) for s in scales] for scales in self.bytes]
        scaled = [[x / powers[r][c // 32] for c, x in enumerate(row)] for r, row in enumerate(rows)]
        self.codes = codes_of(scaled, noise)
        self.values = [
            [e2m1_value(code) * powers[r][c // 32] for c, code in enumerate(row)] for r, row in enumerate(self.codes)
        ]


def codes_of(scaled, noise):
    if noise is None:
        return [[e2m1(v) for v in row] for row in scaled]
    return [[e2m1_stochastic(v, n) for v, n in zip(*both, strict=False)] for both in zip(scaled, noise, strict=True)]


def _ue8m0(bamax):
    if not math.isfinite(bamax):
        return 255
    byte = 0
    while 6.0 * 2.0 ** (byte - 127) < bamax:
        byte += 1
    return byte


def rotate(group, signs):
    """One group, given as bfloat16 values: signs, butterfly in float32 with growing strides.

    Divided by the root of the size: at first if that is 2, 4 or 8, else at last by a product.
    """
    size = len(group)
    divisor, factor = {4: (2, 1.0), 16: (4, 1.0), 64: (8, 1.0)}.get(size, (1, f32(1 / math.sqrt(size))))
    y = [(-x if signs >> (i % 16) & 1 else x) / divisor for i, x in enumerate(group)]
    stride = 1
    while stride < size:
        for i in range(size):
            if not i & stride:
                y[i], y[i + stride] = f32(y[i] + y[i + stride]), f32(y[i] - y[i + stride])
        stride *= 2
    return [bf16(f32(v * factor)) for v in y]


def bf16(x):
    """x, a float32, rounded to the nearest even bfloat16."""
    if math.isnan(x) or math.isinf(x):
        return x
    bits = struct.unpack("I", struct.pack("f", x))[0]
    low, kept = bits & 0xFFFF, bits >> 16
    kept += low > 0x8000 or (low == 0x8000 and kept & 1)
    return struct.unpack("f", struct.pack("I", kept << 16))[0]


def noise16(seed, site, row, column, width):
    """The 16 random bits of one element: half of one of the two words of its counter."""
    low, high = seed % 2**32, seed // 2**32 % 2**32
    keys = []
    for tweak in (0x1B873593, 0x4CF5AD43):
        x = _mix(low + tweak)
        x = _mix(x + high)
        keys.append(_mix(x + (site ^ tweak)))
    counter, place = divmod(row * width + column, 4)
    z = _fold(counter + keys[0], 0x7FEB352D) ^ keys[1]
    word = _fold(z, 0x446CA68B if place < 2 else 0x53C5CA59)
    return word // 2**16 if place % 2 else word % 2**16


def noise_of(seed, site, rows, width):
    return [[noise16(seed, site, r, c, width) for c in range(width)] for r in range(rows)]


def _mix(x):
    return _fold(_fold(x, 0x7FEB352D), 0x446CA68B)


def _fold(x, factor):
    """Both halves of the 64-bit product, joined by exclusive or; x modulo 2^32."""
    high, low = divmod(x % 2**32 * factor, 2**32)
    return high ^ low
