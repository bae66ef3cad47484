"""What each operand of each GEMM gets: format, block, rounding, rotation. Frozen data with value equality.

A linear layer Y = X W^T (x [T, K], w [N, K], dy [T, N]) has three GEMMs, each contracted along the last
dimension of both operands as they are listed here:

    role     left          right         result
    forward  x   [T, K]    w   [N, K]    y  [T, N]
    dgrad    dy  [T, N]    w^T [K, N]    dx [T, K]
    wgrad    dy^T [N, T]   x^T [K, T]    dw [N, K]

Which matmuls of a model take part is the policy's matter, how a device runs them is the lowering's. The
defaults are the recipe of "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast, get_args

from .config import as_object, bad_value, canonical_json, check_fields, is_count, read_object
from .errors import ConfigError

Format = Literal["nvfp4", "mxfp4", "bf16"]
Role = Literal["forward", "dgrad", "wgrad"]
Rounding = Literal["nearest", "stochastic"]
RotatedScale = Literal["amax", "bound"]
Scale = Literal["tensor", "row"]
Precision = Literal["recipe", "nvfp4", "mxfp4", "bf16"]
"""What a policy says of one GEMM: as the recipe has it, or one format for both operands."""

ROLES: tuple[Role, ...] = get_args(Role)
OPERANDS: Mapping[Role, tuple[str, str]] = {"forward": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
"""The left and the right operand of each GEMM."""

_ALL_OPERANDS = tuple(f"{role}.{name}" for role in ROLES for name in OPERANDS[role])
_WEIGHT_BLOCKS = ((16, 16), (1, 16))
_ROTATIONS = (0, 4, 8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class OperandSpec:
    """How one operand is quantized.

    ``block`` is (rows, columns) of the elements that share a scale, columns along the contraction dimension;
    None for a bf16 operand, whose ``rounding`` means nothing. ``scale``: what one float32 scale of an NVFP4 operand
    is for.
    """

    format: Format
    block: tuple[int, int] | None
    rounding: Rounding
    scale: Scale = "tensor"


@dataclasses.dataclass(frozen=True)
class GemmSpec:
    """How one GEMM is done. ``rotate`` 0 is no rotation; otherwise both operands are rotated along the
    contraction dimension in groups of that many elements, with the sign mask ``signs``, and ``rotated_scale``
    says where their tensor scales come from."""

    left: OperandSpec
    right: OperandSpec
    rotate: int
    signs: int
    rotated_scale: RotatedScale = "amax"

    @property
    def precision(self) -> Literal["nvfp4", "mxfp4"]:
        """The format of the first FP4 operand: the name that a report gives to the GEMM."""
        return cast(Literal["nvfp4", "mxfp4"], self.right.format if self.left.format == "bf16" else self.left.format)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """Formats, blocks, rounding and rotation of the three GEMMs. Every field is one switch.

    The constructor's defaults are NVIDIA's recipe. Raises ConfigError naming field, value and what is
    allowed.
    """

    forward: Format | tuple[Format, Format] = "nvfp4"
    """Formats of (x, w) in the forward GEMM; one name stands for both. Stored as a pair."""

    dgrad: Format | tuple[Format, Format] = "nvfp4"
    """Formats of (dy, w) in the GEMM of the input's gradient."""

    wgrad: Format | tuple[Format, Format] = "nvfp4"
    """Formats of (dy, x) in the GEMM of the weight's gradient."""

    weight_block: tuple[int, int] = (16, 16)
    """Elements of an NVFP4 weight that share a scale. (16, 16): w and its transpose have the same codes, so
    forward and dgrad see one weight. (1, 16): a more accurate forward, and w^T quantized by itself for
    dgrad."""

    rotation: int = 16
    """Size of the random Hadamard transform on both operands of wgrad, along the tokens: 4, 8 ... 128, or 0
    for none. Any of them goes with any format: sizes and blocks are powers of two, and both operands are
    zero-padded to the same multiple of ``rotation`` before they are rotated, so what a block adds beyond that
    is zeros on both sides. A bf16 operand is rotated too, since the transform cancels only if both operands
    have it."""

    signs: int = 0xD7E8
    """The transform's signs as 16 bits: element i of a group is negated where bit (i mod 16), counted from
    the lowest, is set. A shorter group uses the low bits, a longer one repeats the pattern. One value for all
    layers and ranks."""

    rotated_scale: RotatedScale = "amax"
    """Where the tensor scale of a rotated NVFP4 operand comes from. "amax": the largest magnitude after the
    rotation, as NVIDIA does it. "bound": what that cannot exceed, the largest magnitude before the rotation
    times ``formats.rotation.growth(rotation)``, 4 for a rotation of 16. The other GEMMs' operands need the
    magnitude before the rotation anyway, so no pass over the tensor is made for it. It is up to 16 times too
    large with a rotation of 16, so block scales are up to four binades smaller; docs/performance.md has what
    that does to the error. A magnitude so large that the bound is no finite float32, above 8.5e37 with a
    rotation of 16, makes the GEMM's result non-finite as a non-finite operand does. Without effect without a
    rotation and on operands in MXFP4, which have no tensor scale, or bf16."""

    activation_scale: Scale = "tensor"
    """What one float32 scale of x in the forward GEMM is for: the "tensor", as NVIDIA does it, or a "row", that is
    a token. With a scale a row nothing has to be reduced over the whole tensor before x is quantized: a row's largest
    magnitude comes out of the kernel that computes the row, a norm or an activation, and a token with large values
    costs the others nothing. The product is multiplied by rows in the kernel of what follows: mostly in its own
    epilogue where tensor cores multiply FP4; elsewhere its result is written in float32 first. All other operands keep
    their tensor scale; those of wgrad have blocks along the tokens. Without effect on x in MXFP4, which
    has no tensor scale, or bf16."""

    stochastic: Collection[str] = frozenset({"dgrad.dy", "wgrad.dy"})
    """Operands, as "role.operand", that are rounded stochastically; all others to nearest even. Without
    effect on an operand that is bf16. Stored as a frozenset."""

    def __post_init__(self) -> None:
        for role in ROLES:
            object.__setattr__(self, role, _formats(role, getattr(self, role)))
        object.__setattr__(self, "weight_block", _weight_block(self.weight_block))
        if not is_count(self.rotation) or self.rotation not in _ROTATIONS:
            raise bad_value(Recipe, "rotation", self.rotation, f"one of {', '.join(map(str, _ROTATIONS))} (0: off)")
        if not is_count(self.signs) or self.signs >= 1 << 16:
            raise bad_value(Recipe, "signs", self.signs, "a mask of 16 bits, 0 to 0xFFFF")
        if self.rotated_scale not in get_args(RotatedScale):
            raise bad_value(Recipe, "rotated_scale", self.rotated_scale, "'amax' or 'bound'")
        if self.activation_scale not in get_args(Scale):
            raise bad_value(Recipe, "activation_scale", self.activation_scale, "'tensor' or 'row'")
        object.__setattr__(self, "stochastic", _stochastic(self.stochastic))

    @classmethod
    def nvidia(cls, **changes: Any) -> Recipe:
        """NVIDIA's recipe, with single fields changed: ``Recipe.nvidia(forward="bf16", rotation=0)``."""
        check_fields(cls, changes)
        return cls(**changes)

    @classmethod
    def bf16(cls) -> Recipe:
        """Nothing in FP4, except where a policy's override names a format; that GEMM is then done as NVIDIA
        does it."""
        return cls(forward="bf16", dgrad="bf16", wgrad="bf16")

    @classmethod
    def named(cls, name: str) -> Recipe:
        """A recipe by name: "nvidia", "bf16", or "mxfp4" (all three GEMMs in MXFP4, rotation of 32 on wgrad,
        stochastic rounding of gradients)."""
        if name == "nvidia":
            return cls.nvidia()
        if name == "bf16":
            return cls.bf16()
        if name == "mxfp4":
            return cls(forward="mxfp4", dgrad="mxfp4", wgrad="mxfp4", rotation=32)
        raise ConfigError(f"there is no recipe named {name!r}; the names are 'nvidia', 'bf16' and 'mxfp4'")

    @classmethod
    def of(cls, value: Recipe | str | None) -> Recipe:
        """What an option may hold, as a Recipe: one, a name, or None for NVIDIA's."""
        if isinstance(value, Recipe):
            return value
        if value is None:
            return cls.nvidia()
        if isinstance(value, str):
            return cls.named(value)
        raise ConfigError(f"a recipe is a Recipe or one of the names 'nvidia', 'bf16', 'mxfp4', not {value!r}")

    def gemm(self, role: Role, precision: Precision | None = None) -> GemmSpec | None:
        """How the GEMM ``role`` is done; None if both operands are bf16, that is, if it stays as the model
        has it.

        ``precision`` is a policy's word: "nvfp4", "mxfp4" or "bf16" replaces the format of both operands,
        "recipe" or None leaves them.
        """
        if role not in ROLES:
            raise ConfigError(f"there is no GEMM {role!r}; the roles are {', '.join(ROLES)}")
        formats = cast(tuple[Format, Format], getattr(self, role))
        if precision is not None and precision != "recipe":
            formats = _formats(role, precision)
        if formats == ("bf16", "bf16"):
            return None
        left, right = (self._operand(role, name, fmt) for name, fmt in zip(OPERANDS[role], formats, strict=True))
        rotate = self.rotation if role == "wgrad" else 0
        if not rotate:
            return GemmSpec(left, right, 0, 0)
        return GemmSpec(left, right, rotate, self.signs, self.rotated_scale)

    def _operand(self, role: Role, name: str, fmt: Format) -> OperandSpec:
        if fmt == "bf16":
            return OperandSpec("bf16", None, "nearest")
        rounding: Rounding = "stochastic" if f"{role}.{name}" in self.stochastic else "nearest"
        if fmt == "mxfp4":
            return OperandSpec(fmt, (1, 32), rounding)
        scale = self.activation_scale if (role, name) == ("forward", "x") else "tensor"
        return OperandSpec(fmt, self.weight_block if name == "w" else (1, 16), rounding, scale)

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON values."""
        return {
            **{role: list(getattr(self, role)) for role in ROLES},
            "weight_block": list(self.weight_block),
            "rotation": self.rotation,
            "signs": self.signs,
            "rotated_scale": self.rotated_scale,
            "activation_scale": self.activation_scale,
            "stochastic": sorted(self.stochastic),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Recipe:
        """The inverse of ``to_dict``. A missing field is as in NVIDIA's recipe; an unknown one is a
        ConfigError."""
        return cls(**as_object(cls, value))

    def to_json(self) -> str:
        """Canonical JSON: equal recipes give the same text."""
        return canonical_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The inverse of ``to_json``; fields as in ``from_dict``."""
        return cls(**read_object(cls, text))

    def __repr__(self) -> str:
        """``Recipe.nvidia(...)`` with the fields that differ from NVIDIA's recipe. Evaluates to an equal
        recipe."""
        changed = [
            f"{field.name}={_show(field.name, getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(_NVIDIA, field.name)
        ]
        return f"Recipe.nvidia({', '.join(changed)})"


def _formats(role: Role, value: object) -> tuple[Format, Format]:
    """A pair of formats from one name or a pair of names."""
    pair = (value, value) if isinstance(value, str) else tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(pair) != 2 or any(fmt not in get_args(Format) for fmt in pair):
        left, right = OPERANDS[role]
        raise bad_value(Recipe, role, value, f"'nvfp4', 'mxfp4' or 'bf16', or a pair of them for ({left}, {right})")
    return cast(tuple[Format, Format], pair)


def _weight_block(value: object) -> tuple[int, int]:
    for block in _WEIGHT_BLOCKS:
        if isinstance(value, (tuple, list)) and tuple(value) == block:
            return block
    raise bad_value(Recipe, "weight_block", value, "(16, 16) or (1, 16)")


def _stochastic(value: object) -> frozenset[str]:
    if not isinstance(value, (set, frozenset, tuple, list)) or any(name not in _ALL_OPERANDS for name in value):
        raise bad_value(Recipe, "stochastic", value, f"a set of operands out of {', '.join(_ALL_OPERANDS)}")
    return frozenset(value)


def _show(field: str, value: Any) -> str:
    if field in ROLES and value[0] == value[1]:
        return repr(value[0])
    if field == "signs":
        return f"0x{value:04X}"
    if field == "stochastic":
        return "{" + ", ".join(map(repr, sorted(value))) + "}" if value else "frozenset()"
    return repr(value)


_NVIDIA = Recipe()
