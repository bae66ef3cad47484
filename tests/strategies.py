"""Hypothesis strategies: matrices of every dtype, size, magnitude and kind that has to survive quantization."""

import torch
from hypothesis import strategies as st

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KINDS = ("gaussian", "heavy tails", "wide range", "on a grid", "constant", "zero", "some zero blocks")
# Powers of two; the ends reach the subnormal numbers and the largest finite one of each dtype.
EXPONENTS = (-149, -140, -126, -100, -20, -8, 0, 8, 100, 127)

seeds = st.integers(-(2**63), 2**63 - 1)
sites = st.integers(0, 2**32 - 1)


@st.composite
def matrices(draw, rows=(1, 2, 15, 17, 33), cols=(1, 7, 16, 33, 48, 80), dtypes=DTYPES, exponents=EXPONENTS):
    """A finite 2-D tensor, contiguous or transposed or a slice of a larger one."""
    shape = draw(st.sampled_from(rows)), draw(st.sampled_from(cols))
    x = _values(shape, draw(st.sampled_from(KINDS)), draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(dtypes))
    limit = torch.finfo(dtype).max
    # In float64 first: the power of two alone may not be a number of the dtype.
    x = (x * 2.0 ** draw(st.sampled_from(exponents))).clamp(-limit, limit).to(dtype)
    return draw(st.sampled_from((_contiguous, _transposed, _slice)))(x)


@st.composite
def matrices_with_nonfinite(draw, **options):
    """A matrix with one NaN or Inf somewhere."""
    x = draw(matrices(**options)).clone()
    row, col = draw(st.integers(0, x.shape[0] - 1)), draw(st.integers(0, x.shape[1] - 1))
    x[row, col] = draw(st.sampled_from((float("nan"), float("inf"), -float("inf"))))
    return x


def _values(shape, kind, seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random, dtype=torch.float64)
    if kind == "heavy tails":
        return x**3
    if kind == "wide range":
        return x * 10.0 ** (-12 * torch.rand((shape[0], 1), generator=random, dtype=torch.float64))
    if kind == "on a grid":  # every tie of E2M1 where the block's scale is 1
        x = torch.randint(-24, 25, shape, generator=random).double() / 4
        x[:, ::16] = 6.0
    if kind == "constant":
        return torch.full_like(x, x[0, 0].item())
    if kind == "zero":
        return x * 0  # of both signs
    if kind == "some zero blocks":
        return x * (torch.rand((shape[0], 1), generator=random) < 0.5)
    return x


def _contiguous(x):
    return x.contiguous()


def _transposed(x):
    return x.t().contiguous().t()


def _slice(x):
    larger = torch.full((x.shape[0] + 1, 2 * x.shape[1] + 3), 7.0, dtype=x.dtype)
    view = larger[1:, 3::2]
    view.copy_(x)
    return view
