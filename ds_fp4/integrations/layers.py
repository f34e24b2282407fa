# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What ds_fp4 needs to know of a MoE layer, whichever of DeepSpeed's implementations it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_fp4.integrations.expert_level import ExpertLevel


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer of the model.

    Attributes:
        name: module name, as patterns in `ds_fp4.layers` see it.
        module: the module whose class is swapped.
        experts: the module in it that computes this rank's experts.
        hidden: elements per token.
        ep_size: ranks that share the layer's experts; 1 means that nothing is sent.
        implementation: for messages.
        obstacle: why no codec can reach this layer's traffic, and what to set instead; None if one can.
        expert_level: how the expert level takes such a layer over.
        expert_obstacle: why the expert level cannot take this one over, as the end of a sentence; None if it can.
    """

    name: str
    module: torch.nn.Module
    experts: torch.nn.Module
    hidden: int
    ep_size: int
    implementation: str
    obstacle: str | None
    expert_level: ExpertLevel | None = None
    expert_obstacle: str | None = None
