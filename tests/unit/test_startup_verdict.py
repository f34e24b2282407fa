# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The verdict over all ranks' announcements, and what the summary and the version check say."""

from __future__ import annotations

import pytest

from ds_fp4 import compat
from ds_fp4.config import flatten, parse_block
from ds_fp4.startup import Announcement, judge, read_announcement, start_timeout
from ds_fp4.summary import shorten


def _announce(block: dict | None = None, **fields) -> Announcement:
    flat = flatten(parse_block(block)) if block is not None else {}
    return Announcement(**{"version": "1", "block": flat, "moe_layers": 2, **fields})


ON = {"enabled": True}


def test_agreement():
    assert judge([_announce(ON)] * 3) is None
    assert judge([_announce(None, moe_layers=0)] * 3) is None
    assert judge([_announce({"enabled": False}), _announce(None)]) is None


def test_each_difference_is_a_line_with_values_and_ranks():
    verdict = judge([_announce(ON), _announce({**ON, "recipe": "fp8"}), _announce(ON), _announce(ON)])
    assert '  ds_fp4.recipe: "mxfp4" on ranks 0, 2-3; "fp8" on rank 1' in verdict.splitlines()
    assert '  ds_fp4.all_to_all.dispatch_forward: "mxfp4" on ranks 0, 2-3; "fp8" on rank 1' in verdict.splitlines()


def test_versions_must_match():
    assert 'version of ds_fp4: "1" on rank 0; "2" on rank 1' in judge([_announce(ON), _announce(ON, version="2")])


def test_an_announcement_of_another_version_can_be_read():
    other = read_announcement('{"version": "2", "block": {"ds_fp4.enabled": true}, "moe_layers": 2, "more": 1}')
    assert 'version of ds_fp4: "1" on rank 0; "2" on rank 1' in judge([_announce(ON), other])


def test_errors_come_before_differences_and_are_grouped():
    verdict = judge([_announce(ON), _announce(None, error="broken"), _announce(None, error="broken")])
    assert verdict == "ranks 1-2: broken"


def test_missing_ranks_matter_only_where_ds_fp4_is_enabled():
    assert judge([_announce(None), None]) is None
    verdict = judge([_announce(ON), None, None], timeout=7)
    assert "ranks 1-2 are missing: no announcement within 7 s" in verdict


def test_pipeline_stages_without_moe_layers_are_fine_if_another_has_some():
    assert judge([_announce(ON, moe_layers=0), _announce(ON, moe_layers=1)]) is None
    assert "no MoE layer" in judge([_announce(ON, moe_layers=0)] * 2)


def _experts(*by: tuple, **fields) -> Announcement:
    """A rank with layers of these names, and what computes their experts."""
    return _announce(ON, moe_layers=len(by), experts_by=dict(by), **fields)


def test_pipeline_stages_hold_different_layers():
    stages = [_experts(("0.moe", ["emulation"])), _experts(("1.moe", "DeepSpeed")), _experts()]
    assert judge(stages) is None
    verdict = judge([*stages, _experts(("0.moe", ["cublas"]), ("2.moe", ["cublas"]))])
    assert verdict.splitlines()[1:] == ['  0.moe: computed by: ["emulation"] on rank 0; ["cublas"] on rank 3']
    assert "`ds-fp4 report`" in verdict and 'experts.compute to "bf16"' in verdict


def test_a_pattern_must_decide_in_one_stage_at_least():
    first, second = {"k.a": "matches none: 0.moe", "k.b": "matches none: 0.moe"}, {"k.a": "matches none: 1.moe"}
    stages = [_announce(ON, idle_patterns=first), _announce(ON, idle_patterns=second)]
    dense = _announce(ON, moe_layers=0, idle_patterns={**first, "k.c": "matches none: "})
    assert judge([*stages, dense]) == "k.a: matches none: 0.moe\nk.a: matches none: 1.moe"
    assert judge([stages[0], _announce(ON), dense]) is None


def _dense(checkpointing: dict | None, **block) -> str | None:
    """The verdict on a model without MoE layers."""
    block = {**ON, **({} if checkpointing is None else {"checkpointing": {"enabled": True, **checkpointing}}), **block}
    return judge([_announce(block, moe_layers=0, moe_requests=parse_block(block).moe_requests)] * 2)


@pytest.mark.parametrize("scope", (["model.layers.*"], []))
@pytest.mark.parametrize(
    "block", ({}, {"recipe": "bf16"}, {"scale_rounding": "floor"}, {"all_to_all": {}, "experts": {}, "layers": {}})
)
def test_checkpointing_by_name_needs_no_moe_layer(scope, block):
    assert _dense(dict(scope=scope), **block) is None


@pytest.mark.parametrize("checkpointing", ({}, dict(scope="layers"), dict(scope="experts")))
def test_scopes_that_are_found_by_moe_layers_need_some(checkpointing):
    verdict = _dense(checkpointing)
    scope = checkpointing.get("scope", "layers")
    assert f'ds_fp4.checkpointing.scope = "{scope}" is found by MoE layers, but the model has no MoE layer' in verdict
    assert 'Set scope to a list of patterns of module names, such as ["model.layers.*"], or to []' in verdict


@pytest.mark.parametrize(
    "block, keys",
    (
        ({"recipe": "mxfp4"}, "ds_fp4.recipe"),
        ({"all_to_all": {"combine_forward": "fp8"}}, "ds_fp4.all_to_all"),
        ({"recipe": "fp8", "layers": {"*.0.*": "bf16"}}, "ds_fp4.recipe, ds_fp4.layers"),
        ({"recipe": "bf16", "experts": {"compute": "fp8"}}, "ds_fp4.experts"),
    ),
)
def test_a_block_that_asks_for_more_than_checkpointing_needs_moe_layers(block, keys):
    verdict = _dense(dict(scope=["*"]), **block)
    assert verdict.startswith(f"{keys}: the model has no MoE layer") and f"or leave {keys} out" in verdict
    # Without checkpointing even a default is refused: nothing would be done.
    assert "ds_fp4.enabled is true, but the model has no MoE layer" in _dense(None, **block)
    assert "or ds_fp4.checkpointing.enabled to true" in _dense(None)


@pytest.mark.parametrize("text", ("soon", "-1", "0", "nan"))
def test_a_wrong_timeout_is_refused(text, monkeypatch):
    monkeypatch.setenv("DS_FP4_START_TIMEOUT", text)
    with pytest.raises(ValueError, match="expected a number of seconds above 0"):
        start_timeout()


@pytest.mark.parametrize(
    "found, accepted",
    [
        ("0.19.2", True),
        ("0.19.8", True),
        ("0.19.8+cu130", True),
        ("0.19.1", False),
        ("0.19.9", False),
        ("0.20.0", False),
        ("0.9.9", False),
    ],
)
def test_deepspeed_releases(found, accepted, monkeypatch):
    monkeypatch.delenv(compat.SKIP_VARIABLE, raising=False)
    monkeypatch.setattr("deepspeed.__version__", found)
    if accepted:
        compat.check_deepspeed()
    else:
        with pytest.raises(
            RuntimeError, match=f"tested with deepspeed 0.19.2 to 0.19.8, but deepspeed {found} is installed"
        ):
            compat.check_deepspeed()


@pytest.mark.parametrize("found, accepted", [("5.12.0", True), ("5.22.2", True), ("5.23.0", False), ("4.57.6", False)])
def test_transformers_releases(found, accepted, monkeypatch):
    monkeypatch.delenv(compat.SKIP_VARIABLE, raising=False)
    monkeypatch.setattr(compat, "version", lambda package: found)
    if accepted:
        compat.check_transformers()
    else:
        with pytest.raises(RuntimeError, match=f"transformers {found} is installed"):
            compat.check_transformers()


def test_layer_names_are_shortened():
    assert shorten(["m.0.a", "m.1.a", "m.3.a", "head"]) == "m.{0-1,3}.a, head"
    assert shorten(["m.5.a"]) == "m.5.a"
