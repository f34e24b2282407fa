# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Expert layers on one rank, problems for them, and DeepSpeed's own result."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from deepspeed.moe.ep_experts import apply_expert_activation

from ds_fp4.config import LayerRecipe, layer_recipe, parse_block
from ds_fp4.experts import ExpertLayer, LayerSpec
from ds_fp4.gemm import GemmBackends
from ds_fp4.gemm.emulation import EmulationBackend

HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 8
NAMES = ("x", "scores", "w1", "w2", "w3")


class CountingBackend(EmulationBackend):
    """The emulation, with the calls that were made."""

    def __init__(self) -> None:
        self.grouped = self.wgrad = 0

    def _grouped_gemm(self, *args: Any) -> None:
        self.grouped += 1
        super()._grouped_gemm(*args)

    def weight_gradient(self, *args: Any) -> None:
        self.wgrad += 1
        super().weight_gradient(*args)


def recipe_of(recipe: str = "mxfp4", all_to_all: dict | None = None, **experts: str) -> LayerRecipe:
    block = {"enabled": True, "recipe": recipe, "all_to_all": all_to_all or {}, "experts": experts}
    return layer_recipe(parse_block(block), "layer")


def spec_of(k: int = 2, ep_size: int = 1, **more: Any) -> LayerSpec:
    return LayerSpec(
        **{
            "hidden": HIDDEN,
            "intermediate": INTERMEDIATE,
            "local_experts": EXPERTS // ep_size,
            "ep_size": ep_size,
            "top_k": k,
            **more,
        }
    )


def make_layer(
    recipe: LayerRecipe | None = None,
    spec: LayerSpec | None = None,
    group: Any = None,
    gemms: GemmBackends | None = None,
) -> ExpertLayer:
    """A layer whose GEMMs are counted, and emulated, unless it is given others."""
    if gemms is None:
        backend = CountingBackend()
        gemms = GemmBackends(backend, backend)
    return ExpertLayer(spec or spec_of(), recipe or recipe_of(), group, gemms)


class Problem(NamedTuple):
    """Leaves x [T, H], scores FP32 [T, k], w1, w2, w3; expert ids int64 [T, k]; dy [T, H]."""

    x: torch.Tensor
    scores: torch.Tensor
    expert_ids: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    dy: torch.Tensor

    def leaves(self) -> dict[str, torch.Tensor]:
        return dict(zip(NAMES, (self.x, self.scores, *self.weights), strict=True))

    def run(self, layer: ExpertLayer) -> dict[str, torch.Tensor | None]:
        """Output and the gradients of the leaves that need one; gradients of leaves are cleared before."""
        for leaf in self.leaves().values():
            leaf.grad = None
        output = layer(self.x, self.scores, self.expert_ids, self.weights)
        output.backward(self.dy)
        return {"output": output.detach(), **{name: leaf.grad for name, leaf in self.leaves().items()}}


def random_ids(tokens: int, k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(tokens, experts, generator=generator).topk(k, dim=1).indices


def make_problem(
    tokens: int = 200,
    k: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    expert_ids: torch.Tensor | None = None,
    seed: int = 0,
    scale: float = 1.0,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    experts: int = EXPERTS,
) -> Problem:
    """Gaussian tokens, weights and output gradients; routing weights that sum to 1."""
    g = torch.Generator().manual_seed(seed)
    tokens = tokens if expert_ids is None else expert_ids.shape[0]
    w1, w3 = (torch.randn(experts, intermediate, hidden, generator=g) * (scale * hidden**-0.5) for _ in range(2))
    w2 = torch.randn(experts, hidden, intermediate, generator=g) * intermediate**-0.5
    x, dy = (torch.randn(tokens, hidden, generator=g) for _ in range(2))
    if expert_ids is None:
        expert_ids = random_ids(tokens, k, experts, g)
    scores = torch.rand(expert_ids.shape, generator=g) + 0.1
    scores = (scores / scores.sum(1, keepdim=True)).requires_grad_()
    weights = tuple(torch.nn.Parameter(w.to(dtype)) for w in (w1, w2, w3))
    return Problem(x.to(dtype).requires_grad_(), scores, expert_ids, weights, dy.to(dtype))


def deepspeed_result(
    problem: Problem, activation: str = "swiglu", alpha: float = 1.702, limit: float = 7.0
) -> dict[str, torch.Tensor]:
    """The same in the problem's dtype, as AutoEP computes it: experts, then the weighted sum in FP32."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in problem.leaves().values()]
    x, scores, w1, w2, w3 = leaves
    rows = torch.zeros(*problem.expert_ids.shape, x.shape[1], dtype=x.dtype)
    for e in range(w1.shape[0]):
        token, slot = torch.nonzero(problem.expert_ids == e, as_tuple=True)
        gate, up = x[token] @ w1[e].t(), x[token] @ w3[e].t()
        h = apply_expert_activation(gate, up, activation, alpha, limit, fused=False)
        rows = rows.index_put((token, slot), h @ w2[e].t())
    output = (rows * scores[:, :, None]).sum(1).to(x.dtype)
    output.backward(problem.dy)
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in zip(NAMES, leaves, strict=True)}}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
