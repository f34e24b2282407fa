# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Codec level of `deepspeed.moe.layer.MoE`: equal splits, any gate, k, capacity and expert module."""

from __future__ import annotations

import torch
from deepspeed.moe import sharded_moe
from deepspeed.moe.sharded_moe import MOELayer

from ds_fp4.all_to_all import Leg, codec_all_to_all
from ds_fp4.integrations.layers import MoELayer
from ds_fp4.integrations.seam import install_shim


def find(model: torch.nn.Module) -> list[MoELayer]:
    """Every classic MoE layer of the model, by the name of its `MoE` module."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MOELayer):
            # `MoE` holds its MOELayer as `deepspeed_moe`; users know the former's name.
            found.append(MoELayer(name.removesuffix(".deepspeed_moe"), module, module.experts,
                                  hidden=module.gate.wg.in_features, ep_size=module.ep_size,
                                  implementation="deepspeed.moe.layer.MoE", obstacle=None))
    return found


def install() -> None:
    """Put the shim in place of DeepSpeed's autograd function."""
    install_shim(sharded_moe, "_AllToAll", ["group", "input"], _adapt)


def _adapt(leg: Leg, group, rows: torch.Tensor) -> torch.Tensor:
    return codec_all_to_all(rows, leg, group)
