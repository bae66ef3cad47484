"""What the backend accepts, and that it refuses the rest with the way out in the message."""

import pytest
import torch
from torch import nn

from fp4compile import Policy, Recipe, prepare
from fp4compile.errors import ConfigError
from fp4compile.options import parse_options


def test_no_options_are_nvidias_recipe_and_the_default_policy():
    options = parse_options(None)
    assert options.recipe == Recipe.nvidia()
    assert options.policy == Policy()
    assert options.strict
    assert not options.inductor


def test_a_recipe_and_a_policy_may_be_given_by_name_and_by_dict():
    options = parse_options({"recipe": "mxfp4", "policy": {"skip": ["*.gate"], "last": 2}})
    assert options.recipe == Recipe.named("mxfp4")
    assert options.policy == Policy(skip=("*.gate",), last=2)


def test_a_plans_options_are_accepted():
    plan = prepare(nn.Sequential(nn.Linear(16, 16)))
    assert parse_options(plan.options).policy == plan.decisions


def test_mode_alone_and_mode_among_the_options_mean_the_same():
    by_mode = parse_options(None, mode="max-autotune")
    assert by_mode.inductor["max_autotune"] is True
    assert parse_options({"mode": "max-autotune"}).inductor == by_mode.inductor


def test_inductor_settings_are_checked_and_dashes_mean_underscores():
    assert parse_options({"inductor": {"max-autotune": True}}).inductor == {"max_autotune": True}
    assert parse_options({"inductor": {"cpp.threads": 1}}).inductor == {"cpp.threads": 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipee": "nvidia"}, ["'recipee'", "recipe, policy, mode, inductor, strict"]),
        ({"recipe": 4}, ["recipe", "4"]),
        ({"recipe": "nvfp5"}, ["'nvfp5'", "'nvidia'"]),
        ({"policy": 3}, ["policy", "int"]),
        ({"policy": {"skipp": ["a"]}}, ["skipp", "skip"]),
        ({"policy": {"skip": [3]}}, ["skip", "glob"]),
        ({"mode": "fastest"}, ["'fastest'", "max-autotune"]),
        ({"mode": 3}, ["mode", "3"]),
        ({"inductor": {"no_such_setting": 1}}, ["no_such_setting"]),
        ({"inductor": {"joint_custom_pre_pass": None}}, ["joint_custom_pre_pass", "used by this backend"]),
        ({"inductor": ["max_autotune"]}, ["inductor", "dict"]),
        ({"strict": "no"}, ["strict", "True or False"]),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, words):
    with pytest.raises(ConfigError) as error:
        parse_options(options)
    for word in words:
        assert word in str(error.value)


def test_mode_beside_options_is_refused():
    with pytest.raises(ConfigError, match="either mode= or options="):
        parse_options({"strict": False}, mode="max-autotune")


def test_a_wrong_option_reaches_the_user_of_torch_compile_in_words():
    compiled = torch.compile(nn.Linear(16, 16), backend="nvfp4", options={"recpie": "nvidia"})
    with pytest.raises(Exception, match="unknown option 'recpie' for backend 'nvfp4'; known: recipe, policy"):
        compiled(torch.ones(2, 16))


def test_settings_are_part_of_the_cache_key():
    assert parse_options({"inductor": {"cpp.threads": 1}}).key() != parse_options(None).key()
