"""What torch.compile(options=..., mode=...) accepts, what it means, and what is refused with which words."""

from __future__ import annotations

import re
from typing import Any

import compiling
import pytest
import torch
from graphs import fp4
from models import K, N, tokens
from torch import fx, nn

import fp4compile
from fp4compile import Policy, Recipe, compat, nvfp4
from fp4compile.errors import ConfigError
from fp4compile.options import parse_options


def test_no_options_are_nvidias_recipe_the_default_policy_and_strict() -> None:
    for given in (None, {}):
        options = parse_options(given)
        assert (options.recipe, options.policy) == (Recipe.nvidia(), Policy())
        assert options.strict
        assert not options.inductor


def test_recipe_and_policy_are_taken_in_every_form() -> None:
    recipe, policy = Recipe.named("mxfp4"), Policy(skip=["*.gate"])
    assert parse_options({"recipe": recipe}).recipe is recipe
    assert parse_options({"recipe": "mxfp4"}).recipe == recipe
    assert parse_options({"policy": policy}).policy is policy
    assert parse_options({"policy": {"skip": ["*.gate"]}}).policy == policy
    decisions = fp4compile.prepare(nn.Linear(K, N)).options["policy"]
    assert parse_options({"policy": decisions}).policy is decisions


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"])
def test_a_mode_is_inductors_settings_in_both_places(mode: str) -> None:
    settings = parse_options({"mode": mode}).inductor
    assert settings
    assert settings == parse_options(None, mode=mode).inductor
    assert all(compat.inductor_setting_exists(name) for name in settings)


def test_the_default_mode_changes_nothing() -> None:
    assert not parse_options(None, mode="default").inductor


def test_inductors_settings_win_over_the_modes() -> None:
    options = {"mode": "max-autotune", "inductor": {"max-autotune": False, "triton.cudagraphs": False}}
    settings = parse_options(options).inductor
    assert settings["max_autotune"] is False
    assert settings["triton.cudagraphs"] is False
    assert set(settings) > {"max_autotune", "triton.cudagraphs"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipes": "nvidia"}, "unknown option 'recipes'.*known: recipe, policy, mode, inductor, strict"),
        ({"max_autotune": True}, r"unknown option 'max_autotune'.*options=\{'inductor'"),
        ({"recipe": "nvfp5"}, "no recipe named 'nvfp5'.*nvidia"),
        ({"recipe": 4}, "a recipe is a Recipe or one of the names.*not 4"),
        ({"policy": "lm_head"}, "'policy' must be a fp4compile.Policy.*not str"),
        ({"policy": {"skips": ["a"]}}, "skips"),
        ({"policy": {"skip": [3]}}, "skip"),
        ({"strict": "no"}, "'strict' must be True or False, not 'no'"),
        ({"mode": "fastest"}, "unknown mode 'fastest'"),
        ({"mode": 3}, "unknown mode 3"),
        ({"inductor": ["max_autotune"]}, "'inductor' must be a dict.*not list"),
        ({"inductor": {"max_autotunes": True}}, "'max_autotunes' is no Inductor setting"),
        ({"inductor": {3: True}}, "3 is no Inductor setting"),
        ({"inductor": {"joint_custom_pre_pass": print}}, "'joint_custom_pre_pass' is used by this backend"),
        ({"inductor": {"joint-custom-pre-pass": print}}, "'joint-custom-pre-pass' is used by this backend"),
    ],
)
def test_what_is_refused_and_how(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        parse_options(options)


def test_mode_beside_options_is_refused() -> None:
    with pytest.raises(ConfigError, match="either mode= or options="):
        parse_options({"recipe": "nvidia"}, mode="max-autotune")
    with pytest.raises(RuntimeError, match="mode or options"):  # torch.compile's own
        torch.compile(nn.Linear(K, N), backend="nvfp4", options={"recipe": "nvidia"}, mode="max-autotune")


@pytest.mark.parametrize("backend", ["nvfp4", nvfp4])
def test_a_wrong_option_reaches_the_user_of_torch_compile(backend: Any) -> None:
    torch.compiler.reset()
    model = torch.compile(nn.Linear(K, N), backend=backend, options={"recipies": "nvidia"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="unknown option 'recipies'") as caught:
        model(tokens())
    assert isinstance(caught.value.inner_exception, ConfigError)


def test_options_of_torch_compile_decide_what_is_rewritten() -> None:
    precisions = []
    for options in ({}, {"recipe": "mxfp4"}, {"policy": Policy(overrides={"weight": {"wgrad": "bf16"}})}):
        with compiling.interpreted() as plans:
            compiling.step(compiling.compiled(nn.Linear(K, N), **options), tokens())
        (site,) = plans[0].outcome.sites
        precisions.append((site.forward.precision, site.dgrad.precision, site.wgrad.precision))
    assert precisions == [("nvfp4",) * 3, ("mxfp4",) * 3, ("nvfp4", "nvfp4", "bf16")]


def test_a_mode_given_to_torch_compile_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    real = compat.compile_fx

    def compile_fx(gm: fx.GraphModule, inputs: Any, patches: dict[str, Any], inner: Any) -> Any:
        seen.append(dict(patches))
        return real(gm, inputs, {**patches, "max_autotune": False}, inner)

    monkeypatch.setattr(compat, "compile_fx", compile_fx)
    with compiling.interpreted(), torch.no_grad():
        torch.compile(nn.Linear(K, N), backend="nvfp4", mode="max-autotune-no-cudagraphs")(tokens())
    assert seen[0]["max_autotune"] is True


# --- passes that a user had put into Inductor's hooks


class UserPass(torch._inductor.custom_graph_pass.CustomGraphPass):
    def __init__(self, key: Any = "mine") -> None:
        self.key = key
        self.seen: list[int] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(len(graph.find_nodes(op="call_function", target=fp4.scaled_mm.default)))

    def uuid(self) -> Any:
        return self.key


@pytest.mark.parametrize("hook", [compat.JOINT_PASS, "post_grad_custom_pre_pass"])
def test_a_users_pass_in_the_same_hook_still_runs_after_ours(hook: str) -> None:
    user = UserPass()
    with torch._inductor.config.patch({hook: user}), compiling.inductor():
        compiling.step(compiling.compiled(nn.Linear(K, N, bias=False)), tokens())
    assert user.seen == ([3] if hook == compat.JOINT_PASS else [1, 2])


def test_a_users_pass_is_part_of_the_cache_key() -> None:
    def key(user: Any) -> Any:
        with torch._inductor.config.patch({compat.JOINT_PASS: user}):
            return compat.GraphPass(compat.JOINT_PASS, print, "ours").uuid()

    assert key(None) == key(None)
    assert len({key(None), key(UserPass("a")), key(UserPass("b"))}) == 3
    assert key(UserPass(None)) is None, "a pass without a key turns Inductor's caches off"


def test_our_key_is_part_of_the_cache_key() -> None:
    first, second = (compat.GraphPass(compat.JOINT_PASS, print, digest).uuid() for digest in ("one", "two"))
    assert first != second


def test_inductors_settings_are_part_of_the_cache_key() -> None:
    keys = {parse_options({"inductor": settings}).key() for settings in ({}, {"cpp.threads": 1}, {"cpp.threads": 2})}
    assert len(keys) == 3


def test_the_message_about_a_mistyped_pattern_names_it() -> None:
    with pytest.warns(UserWarning, match=re.escape("'weigth' matches no module")), compiling.interpreted():
        compiling.compiled(nn.Linear(K, N), policy=Policy(skip=["weigth"]))(tokens())
