# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What the expert level has to know of one MoE layer."""

from __future__ import annotations

from dataclasses import dataclass

from ds_fp4.config import LayerRecipe
from ds_fp4.formats import FP8_GROUP, MXFP4_BLOCK
from ds_fp4.reference.activation import ACTIVATIONS
from ds_fp4.reference.routing import MAX_EXPERTS, MAX_LOCAL_EXPERTS, MAX_RANKS, MAX_SLOTS


@dataclass(frozen=True)
class LayerSpec:
    """Shapes of one layer on one rank.

    Attributes:
        hidden: H, elements of a token. intermediate: I, elements between the two projections.
        local_experts: experts on each rank. ep_size: ranks that share the layer.
        top_k: experts a token, k.
        activation: one of `reference.activation.ACTIVATIONS`; alpha and limit where it has them.
    """

    hidden: int
    intermediate: int
    local_experts: int
    ep_size: int
    top_k: int
    activation: str = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0

    def obstacle(self) -> str | None:
        """Why the expert level cannot compute such a layer; None if it can."""
        for name, value in (("hidden size", self.hidden), ("intermediate size", self.intermediate)):
            if value % FP8_GROUP:
                return f"its {name} {value} is not a multiple of {FP8_GROUP}, which the FP8 GEMMs' scales need"
        if self.activation not in ACTIVATIONS:
            return f"its activation {self.activation!r} is none of {', '.join(ACTIVATIONS)}"
        if self.top_k > MAX_SLOTS:
            return f"it gives a token {self.top_k} experts, more than {MAX_SLOTS}"
        if self.local_experts > MAX_LOCAL_EXPERTS or self.ep_size > MAX_RANKS:
            return f"it has {self.local_experts} experts on each of {self.ep_size} ranks, more than " + (
                f"{MAX_LOCAL_EXPERTS} of {MAX_RANKS}"
            )
        if self.local_experts * self.ep_size > MAX_EXPERTS:
            return f"it has {self.local_experts * self.ep_size} experts, more than {MAX_EXPERTS}"
        return None

    def kept_bytes(self, recipe: LayerRecipe, unique: float) -> float:
        """Bytes kept for backward per routed row, routing apart.

        Args:
            recipe: the layer's.
            unique: received rows per routed row, U/R: 1 where no token has two experts on a rank.
        """
        per_value = {"mxfp4": 0.5 + 1 / MXFP4_BLOCK, "fp8": 1 + 1 / FP8_GROUP, "bf16": 2.0}
        kept = self.hidden * per_value[recipe.dispatch_forward] * unique
        if recipe.recompute != "fc1":
            kept += 2 * self.intermediate * per_value[recipe.saved_activations]
        return kept
