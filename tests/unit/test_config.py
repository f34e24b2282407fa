# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The `ds_fp4` block: presets, overrides, and what a wrong one is answered with."""

from __future__ import annotations

import pytest

from ds_fp4.config import (
    LEGS,
    ConfigError,
    ResolvedConfig,
    asks_for_fp8_experts,
    flatten,
    has_block,
    layer_recipe,
    parse_block,
)

DESIGN_BLOCK = {
    "enabled": True,
    "recipe": "mxfp4",
    "scale_rounding": "even",
    "all_to_all": {
        "dispatch_forward": "mxfp4",
        "combine_forward": "fp8",
        "combine_backward": "fp8",
        "dispatch_backward": "fp8",
    },
    "experts": {
        "compute": "fp8",
        "saved_activations": "fp8",
        "recompute": "activation",
        "gemm": "auto",
        "wgrad_gemm": "auto",
        "weight_cache": "none",
    },
    "checkpointing": {"enabled": False, "format": "fp8", "exact": True, "scope": "layers", "offload": "none"},
}


def _legs(block: dict, name: str = "layer") -> list[str]:
    recipe = layer_recipe(parse_block(block), name)
    return [getattr(recipe, leg) for leg in LEGS]


def test_the_documented_block_is_the_preset():
    assert layer_recipe(parse_block(DESIGN_BLOCK), "x") == layer_recipe(parse_block({"enabled": True}), "x")


@pytest.mark.parametrize(
    "recipe, legs", [("bf16", ["bf16"] * 4), ("fp8", ["fp8"] * 4), ("mxfp4", ["mxfp4", "fp8", "fp8", "fp8"])]
)
def test_presets(recipe, legs):
    assert _legs({"enabled": True, "recipe": recipe}) == legs


def test_one_key_alone_is_overridden():
    assert _legs({"enabled": True, "all_to_all": {"combine_forward": "mxfp4"}}) == ["mxfp4", "mxfp4", "fp8", "fp8"]


def test_layer_patterns_first_match_wins_and_a_recipe_starts_afresh():
    block = {
        "enabled": True,
        "all_to_all": {"combine_forward": "mxfp4"},
        "scale_rounding": "ceil",
        "layers": {
            "a.0": "bf16",
            "a.*": {"recipe": "mxfp4", "scale_rounding": "floor"},
            "b.*": {"all_to_all": {"dispatch_forward": "fp8"}},
        },
    }
    assert _legs(block, "a.0") == ["bf16"] * 4
    assert _legs(block, "a.1") == ["mxfp4", "fp8", "fp8", "fp8"]
    assert _legs(block, "b.1") == ["fp8", "mxfp4", "fp8", "fp8"]
    assert _legs(block, "c") == ["mxfp4", "mxfp4", "fp8", "fp8"]
    roundings = [layer_recipe(parse_block(block), name).scale_rounding for name in ("a.1", "b.1")]
    assert roundings == ["floor", "ceil"]


def test_who_asks_for_fp8_experts():
    block = {
        "enabled": True,
        "layers": {
            "asked": {"experts": {"compute": "fp8"}},
            "bf16": {"experts": {"compute": "bf16"}},
            "preset": "fp8",
            "other": {"experts": {"gemm": "cublas"}},
        },
    }
    names = ("asked", "bf16", "preset", "other", "unnamed")
    asks = [asks_for_fp8_experts(parse_block(block), name) for name in names]
    assert asks == [True, False, False, False, False]
    block["experts"] = {"compute": "fp8"}
    asks = [asks_for_fp8_experts(parse_block(block), name) for name in names]
    assert asks == [True, False, False, True, True]
    recipes = [layer_recipe(parse_block(block), name) for name in names]
    assert [recipe.gemm for recipe in recipes] == ["auto", "auto", "auto", "cublas", "auto"]
    assert {(recipe.wgrad_gemm, recipe.weight_cache) for recipe in recipes} == {("auto", "none")}


WRONG = [
    ([1], "ds_fp4 = [1]: expected an object"),
    ({}, "ds_fp4.enabled: missing; set it to true or false"),
    ({"enabled": 1}, "ds_fp4.enabled = 1: expected true or false"),
    ({"enabled": True, "recipe": "mxfp5"}, "ds_fp4.recipe = 'mxfp5': allowed values are 'bf16', 'fp8' or 'mxfp4'"),
    ({"enabled": True, "experts": {"weight_cache": "auto"}}, 'ds_fp4.experts.weight_cache = "auto": nothing fills in'),
    ({"enabled": True, "recipe": "auto"}, 'ds_fp4.recipe = "auto": nothing fills in'),
    ({"enabled": True, "all_to_all": {"combine_forward": "auto"}}, 'ds_fp4.all_to_all.combine_forward = "auto"'),
    (
        {"enabled": True, "all_to_al": {}},
        "ds_fp4.all_to_al: unknown key; allowed keys here: enabled, recipe, scale_rounding, "
        'all_to_all, experts, checkpointing, layers. Did you mean "all_to_all"?',
    ),
    ({"enabled": True, "strict": True}, "ds_fp4.strict: unknown key"),
    ({"enabled": True, "all_to_all": {"strict": True}}, "ds_fp4.all_to_all.strict: unknown key"),
    ({"enabled": True, "all_to_all": ["mxfp4"]}, "ds_fp4.all_to_all = ['mxfp4']: expected an object"),
    (
        {"enabled": True, "all_to_all": {"dispatch_forward": 4}},
        "ds_fp4.all_to_all.dispatch_forward = 4: allowed values",
    ),
    (
        {"enabled": True, "experts": {"compute": "fp4"}},
        "ds_fp4.experts.compute = 'fp4': allowed values are 'bf16' or 'fp8'",
    ),
    (
        {"enabled": True, "experts": {"gemm": "triton"}},
        "ds_fp4.experts.gemm = 'triton': allowed values are 'auto', 'deepgemm', 'cublas' or 'emulation'",
    ),
    (
        {"enabled": True, "experts": {"gemm": "auto", "wgrad_gemm": "fp8"}},
        "ds_fp4.experts.wgrad_gemm = 'fp8': allowed",
    ),
    (
        {"enabled": True, "experts": {"weight_cache": True}},
        "ds_fp4.experts.weight_cache = True: allowed values are 'step' or 'none'",
    ),
    (
        {"enabled": True, "experts": {"wgrad": "cublas"}},
        "ds_fp4.experts.wgrad: unknown key; allowed keys here: compute, saved_activations, recompute, gemm, "
        'wgrad_gemm, weight_cache. Did you mean "wgrad_gemm"?',
    ),
    ({"enabled": True, "layers": {"a": "none"}}, "ds_fp4.layers.a.recipe = 'none': allowed values"),
    (
        {"enabled": True, "layers": {"a": {"all_to_all": {"x": 1}}}},
        "ds_fp4.layers.a.all_to_all.x: unknown key; allowed keys here: dispatch_forward",
    ),
    (
        {"enabled": True, "layers": {"a": {"enabled": False}}},
        "ds_fp4.layers.a.enabled: unknown key; allowed keys here: recipe",
    ),
    ({"enabled": True, "checkpointing": {"exact": "no"}}, "ds_fp4.checkpointing.exact = 'no': expected true or false"),
    (
        {"enabled": True, "checkpointing": {"offload": "disk"}},
        "ds_fp4.checkpointing.offload = 'disk': allowed values are 'none' or 'cpu'",
    ),
    (
        {"enabled": True, "checkpointing": {"scope": "layer"}},
        "ds_fp4.checkpointing.scope = 'layer': allowed values are "
        '"experts", "layers" or a list of patterns of module names',
    ),
    ({"enabled": True, "checkpointing": {"scope": [""]}}, "ds_fp4.checkpointing.scope = ['']: allowed values"),
    ({"enabled": True, "checkpointing": {"scope": ["a", 1]}}, "ds_fp4.checkpointing.scope = ['a', 1]: allowed values"),
    ({"enabled": True, "checkpointing": {"scope": "auto"}}, 'ds_fp4.checkpointing.scope = "auto": nothing fills in'),
    (
        {"enabled": True, "checkpointing": {"formt": "fp8"}},
        "ds_fp4.checkpointing.formt: unknown key; allowed keys here: enabled, "
        'format, exact, scope, offload. Did you mean "format"?',
    ),
    ({"enabled": True, 3: 4}, "ds_fp4: the key 3 is not a string"),
]


@pytest.mark.parametrize("block, message", WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_blocks_are_refused_with_the_full_path(block, message):
    with pytest.raises(ConfigError) as error:
        parse_block(block)
    assert message in str(error.value)


def test_every_fault_is_named_at_once():
    with pytest.raises(ConfigError) as error:
        parse_block({"recipe": "x", "all_to_all": {"dispatch_forward": "y", "z": 1}})
    assert len(str(error.value).splitlines()) == 4


def test_a_pattern_without_a_match_is_idle():
    config = parse_block({"enabled": True, "layers": {"model.layer.*": "bf16", "*.0.mlp": "fp8"}})
    idle = ResolvedConfig(config, ["model.layers.0.mlp"]).idle
    assert idle == {"ds_fp4.layers.model.layer.*": "matches none of the model's MoE layers: model.layers.0.mlp"}


def test_a_pattern_behind_a_wider_one_is_idle():
    config = parse_block({"enabled": True, "layers": {"*": "bf16", "model.layers.0.*": "fp8"}})
    idle = ResolvedConfig(config, ["model.layers.0.mlp", "model.layers.1.mlp"]).idle
    assert list(idle) == ["ds_fp4.layers.model.layers.0.*"]
    assert 'has no effect, because "*" above it' in idle["ds_fp4.layers.model.layers.0.*"]


@pytest.mark.parametrize("key", ("ds-fp4", "DS_FP4", "dsfp4"))
def test_a_block_under_a_similar_name_is_refused(key):
    assert has_block({"ds_fp4": {}}) and not has_block({"bf16": {}})
    with pytest.raises(ConfigError, match=f'{key}: unknown key; did you mean "ds_fp4"'):
        has_block({key: {"enabled": True}})


def test_flatten_expands_presets_and_keeps_the_order_of_patterns():
    short, spelled_out = (flatten(parse_block(block)) for block in ({"enabled": True}, DESIGN_BLOCK))
    assert short == spelled_out
    one, other = (
        flatten(parse_block({"enabled": True, "layers": layers}))
        for layers in ({"a.*": "bf16", "*": "fp8"}, {"*": "fp8", "a.*": "bf16"})
    )
    assert one != other
    assert flatten(parse_block({"enabled": False, "recipe": "fp8"})) == {"ds_fp4.enabled": False}
