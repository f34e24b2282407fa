# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Codec level of `deepspeed.moe.layer.MoE`: equal splits, any gate, k, capacity and expert module."""

from __future__ import annotations

import functools
from typing import Any

import torch
from deepspeed.moe import sharded_moe
from deepspeed.moe.sharded_moe import MOELayer

from ds_fp4.all_to_all import Leg, codec_all_to_all
from ds_fp4.checkpointing import recomputing
from ds_fp4.integrations.expert_level_classic import CLASSIC, classic_obstacle
from ds_fp4.integrations.layers import MoELayer
from ds_fp4.integrations.seam import install_shim


def find(model: torch.nn.Module, mpu: Any = None) -> list[MoELayer]:
    """Every classic MoE layer of the model, by the name of its `MoE` module.

    Args:
        mpu: the engine's description of tensor parallelism, if it has one.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MOELayer):
            # `MoE` holds its MOELayer as `deepspeed_moe`; users know the former's name.
            found.append(
                MoELayer(
                    name.removesuffix(".deepspeed_moe"),
                    module,
                    module.experts,
                    hidden=module.gate.wg.in_features,
                    ep_size=module.ep_size,
                    implementation="deepspeed.moe.layer.MoE",
                    obstacle=None,
                    expert_level=CLASSIC,
                    expert_obstacle=classic_obstacle(module, mpu),
                )
            )
    return found


def install() -> None:
    """Put the shim in place of DeepSpeed's autograd function."""
    install_shim(sharded_moe, "_AllToAll", ["group", "input"], _adapt)


def keep_results_of_forward() -> None:
    """Make MOELayer keep in its attributes what its forward put there when it runs again in a recomputation.

    `l_aux` of a recomputation would hold the recomputed graph, and every activation before it, until the next forward.
    """
    original = MOELayer.forward
    if getattr(original, "_ds_fp4_hook", False):
        return

    @functools.wraps(original)
    def forward(self: MOELayer, *args: Any, **kwargs: Any) -> Any:
        if not recomputing():
            return original(self, *args, **kwargs)
        before = {name: self.__dict__[name] for name in ("l_aux", "exp_counts") if name in self.__dict__}
        try:
            return original(self, *args, **kwargs)
        finally:
            self.__dict__.update(before)

    forward._ds_fp4_hook = True
    MOELayer.forward = forward


def _adapt(leg: Leg, group, rows: torch.Tensor) -> torch.Tensor:
    return codec_all_to_all(rows, leg, group)
