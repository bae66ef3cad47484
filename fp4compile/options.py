"""What ``torch.compile(model, backend="nvfp4", options=..., mode=...)`` accepts, checked before anything is
compiled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from . import compat
from .decisions import Decisions
from .errors import ConfigError
from .policy import Policy
from .recipe import Recipe

KNOWN = ("recipe", "policy", "mode", "inductor", "strict", "save", "product")
SAVES = ("auto", "packed", "recompute")
PRODUCTS = ("auto", "cublas", "triton")


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked options. ``inductor`` holds Inductor settings, those of ``mode`` included."""

    recipe: Recipe
    policy: Policy | Decisions
    inductor: Mapping[str, Any]
    strict: bool
    save: str = "auto"
    product: str = "auto"

    def without_rewriting(self) -> Options:
        """The same compilation with every matmul as the model has it."""
        return dataclasses.replace(self, recipe=Recipe.bf16(), policy=Policy(include=()))

    def key(self) -> str:
        """What of the options is not in the plan's digest otherwise."""
        inductor = {name: repr(value) for name, value in sorted(self.inductor.items())}
        return json.dumps([self.save, self.product, inductor])


def parse_options(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """Options from the user's dict.

    Raises:
        ConfigError: an unknown option or Inductor setting, a value of a wrong type, ``mode`` given twice.
    """
    options = dict(options or {})
    unknown = sorted(set(options) - set(KNOWN))
    if unknown:
        raise ConfigError(
            f"unknown option {', '.join(map(repr, unknown))} for backend 'nvfp4'; known: {', '.join(KNOWN)}. "
            "Settings of Inductor go into options={'inductor': {...}}."
        )
    if mode is not None and options:
        raise ConfigError("give either mode= or options= to torch.compile; inside options the key is 'mode'")
    strict = options.get("strict", True)
    if not isinstance(strict, bool):
        raise ConfigError(f"option 'strict' must be True or False, not {strict!r}")
    save = options.get("save", "auto")
    if save not in SAVES:
        raise ConfigError(f"option 'save' must be one of {', '.join(map(repr, SAVES))}, not {save!r}")
    product = options.get("product", "auto")
    if product not in PRODUCTS:
        raise ConfigError(f"option 'product' must be one of {', '.join(map(repr, PRODUCTS))}, not {product!r}")
    return Options(
        recipe=Recipe.of(options.get("recipe")),
        policy=as_policy(options.get("policy")),
        inductor=_inductor(options.get("mode", mode), options.get("inductor")),
        strict=strict,
        save=save,
        product=product,
    )


def as_policy(policy: Policy | Decisions | Mapping[str, Any] | None) -> Policy | Decisions:
    """A policy from itself, a dict of its fields, decisions made by ``prepare`` or None (the default policy)."""
    if policy is None:
        return Policy()
    if isinstance(policy, (Policy, Decisions)):
        return policy
    if isinstance(policy, Mapping):
        return Policy.from_dict(policy)
    raise ConfigError(
        "option 'policy' must be a fp4compile.Policy, a dict of its fields or a plan's decisions, "
        f"not {type(policy).__name__}"
    )


def _inductor(mode: Any, settings: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if mode is not None:
        try:
            result.update(compat.mode_options(mode))
        except (RuntimeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"unknown mode {mode!r}: use a mode of torch.compile, for example 'max-autotune'"
            ) from error
    if settings is None:
        return result
    if not isinstance(settings, Mapping):
        raise ConfigError(f"option 'inductor' must be a dict of Inductor settings, not {type(settings).__name__}")
    for name, value in settings.items():
        if not isinstance(name, str) or not compat.inductor_setting_exists(name):
            raise ConfigError(f"option 'inductor': {name!r} is no Inductor setting of this torch")
        if name.replace("-", "_") == compat.JOINT_PASS:
            raise ConfigError(
                f"option 'inductor': {name!r} is used by this backend; set your pass in Inductor's config instead"
            )
        result[name.replace("-", "_")] = value
    return result
