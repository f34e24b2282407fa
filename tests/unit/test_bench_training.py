# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What the arguments of launch/bench_training.py stand for."""

import pytest

from ds_fp4.config import parse_block
from launch.bench_training import block_of, keys_of


def test_recipes_with_keys():
    config = parse_block(block_of("mxfp4:recompute=fc1,weight_cache=none"))
    assert (config.recipe, config.experts.recompute, config.experts.weight_cache) == ("mxfp4", "fc1", "none")
    assert parse_block(block_of("bf16")).recipe == "bf16"


def test_keys_of_autoep():
    assert keys_of(["gate_up_impl=fused", "async_split_plan=true"]) == {
        "gate_up_impl": "fused",
        "async_split_plan": True,
    }
    with pytest.raises(ValueError, match="--autoep fused: expected KEY=VALUE"):
        keys_of(["fused"])
