# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level inside DeepSpeed's layers: how it gets in and out again.

As at the codec level (`seam`), classes are swapped, so that parameters, their names and attributes, hooks and
checkpoints stay as they are. Two modules of a layer change:

    the layer             router and what follows the experts are DeepSpeed's; between them one call of self.experts
    its experts module    forward: (tokens, scores, expert ids) -> combined output, through `ds_fp4.experts`

The experts are called as a module with positional tensors: ZeRO-3 gathers parameters in hooks, which see no keywords.
`expert_level_autoep` and `expert_level_classic` say what the two are in each of DeepSpeed's implementations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import deepspeed
import torch

from ds_fp4.config import LayerRecipe
from ds_fp4.experts import ExpertLayer, LayerSpec
from ds_fp4.gemm import GemmBackends
from ds_fp4.integrations.seam import SeamError


class ExpertLevelModule:
    """Base of all mixins, by which a swapped module is known."""


class ExpertLevelLayer(ExpertLevelModule):
    """Base of the mixins of swapped layers."""


class ExpertLevelExperts(ExpertLevelModule):
    """Mixin of swapped experts modules. Instances carry `ds_fp4_experts`."""

    ds_fp4_experts: ExpertLayer

    def ds_fp4_weights(self) -> Sequence[torch.Tensor]:
        """This rank's expert weights, as `ds_fp4.experts.weights.quantize` takes them."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor, scores: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        return self.ds_fp4_experts(x, scores, expert_ids, self.ds_fp4_weights())


@dataclass(frozen=True, eq=False)
class ExpertLevel:
    """The expert level of one kind of layer.

    Attributes:
        layer, experts: mixins of the layer and of its experts module.
        spec: shapes of a layer, also where ZeRO-3 has its weights partitioned.
        seam: methods of DeepSpeed's that are overridden or called: class, name, parameters when it was tested.
    """

    layer: type[ExpertLevelLayer]
    experts: type[ExpertLevelExperts]
    spec: Callable[[torch.nn.Module], LayerSpec]
    seam: tuple[tuple[type, str, list[str]], ...]

    def check_seam(self) -> None:
        """Raise SeamError if a method of `seam` is gone or takes other arguments than when it was tested."""
        for owner, name, expected in self.seam:
            method = getattr(owner, name, None)
            found = None if method is None else list(inspect.signature(method).parameters)
            if found != expected:
                raise SeamError(
                    f"DeepSpeed {deepspeed.__version__}: {owner.__name__}.{name} was expected to take {expected}, but "
                    f"{'it does not exist' if found is None else f'takes {found}'}. Install a tested release, or set "
                    'ds_fp4.experts.compute to "bf16".'
                )

    def take_over(self, layer: torch.nn.Module, recipe: LayerRecipe, gemms: GemmBackends) -> None:
        """Make ds_fp4 compute the layer's experts. Its expert-parallel group has to be bound."""
        experts = ExpertLayer(self.spec(layer), recipe, layer.ep_group, gemms)
        _swap(layer, self.layer)
        _swap(layer.experts, self.experts)
        layer.experts.ds_fp4_experts = experts


_swapped_classes: dict[tuple[type, type], type] = {}


def _swap(module: torch.nn.Module, mixin: type) -> None:
    base = type(module)
    if (mixin, base) not in _swapped_classes:
        name = f"Fp4{base.__name__}"
        _swapped_classes[mixin, base] = type(name, (mixin, base), {"__module__": __name__})
    module.__class__ = _swapped_classes[mixin, base]


def restore(layer: torch.nn.Module) -> None:
    """Undo `take_over`; a layer that was never taken over is left alone."""
    for module in (layer, getattr(layer, "experts", None)):
        if isinstance(module, ExpertLevelModule):
            module.__class__ = next(c for c in type(module).__mro__ if not issubclass(c, ExpertLevelModule))
            module.__dict__.pop("ds_fp4_experts", None)
