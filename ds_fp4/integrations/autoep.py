# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Codec level of AutoEP (the `expert_parallel` block): uneven splits, ranks and experts without tokens included."""

from __future__ import annotations

import torch
from deepspeed.module_inject import auto_ep_layer
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

from ds_fp4.all_to_all import Leg, codec_all_to_all
from ds_fp4.integrations.expert_level_autoep import AUTOEP, autoep_obstacle
from ds_fp4.integrations.layers import MoELayer
from ds_fp4.integrations.seam import install_shim


def find(model: torch.nn.Module) -> list[MoELayer]:
    """Every AutoEP layer of the model."""
    return [
        MoELayer(
            name,
            module,
            module.experts,
            hidden=module.hidden_size,
            ep_size=module.ep_size,
            implementation="AutoEP",
            obstacle=_obstacle(module),
            expert_level=AUTOEP,
            expert_obstacle=autoep_obstacle(module),
        )
        for name, module in model.named_modules()
        if isinstance(module, AutoEPMoELayer)
    ]


def _obstacle(layer: AutoEPMoELayer) -> str | None:
    # DeepEP moves tokens in its own buffers and kernels; nothing of it passes through the all-to-all.
    if layer.ep_size > 1 and getattr(layer, "comm_backend", "comm") != "comm":
        return (
            f'expert_parallel.comm_backend = "{layer.comm_backend}" moves tokens outside the all-to-all, where no '
            'codec of ds_fp4 can reach them. Set expert_parallel.comm_backend to "comm", or ds_fp4.recipe to "bf16"'
        )
    return None


def install() -> None:
    """Put the shim in place of DeepSpeed's autograd function."""
    install_shim(auto_ep_layer, "_AllToAllV", ["group", "x", "input_splits", "output_splits"], _adapt)


def _adapt(leg: Leg, group, rows: torch.Tensor, input_splits: list[int], output_splits: list[int]) -> torch.Tensor:
    return codec_all_to_all(rows, leg, group, input_splits, output_splits)
