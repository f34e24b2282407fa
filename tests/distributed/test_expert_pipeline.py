# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Pipeline stages: ranks that hold different MoE layers, or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.harness import RankFailure, run_ranks

WIDTH = 128


class _Dense(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class _Block(nn.Module):
    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        from ds_fp4.nn import SwiGLUExpert

        super().__init__()
        self.moe = MoE(WIDTH, SwiGLUExpert(WIDTH, WIDTH), num_experts=2, ep_size=1, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


def _mse(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((y - target) ** 2).mean()


def _train(layout: str, block: dict | None) -> tuple[list[float], list[str]]:
    """Losses of two stages whose layers are "d" (dense) or "m" (MoE), and the layers here at the expert level."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    import ds_fp4  # noqa: F401

    torch.manual_seed(0)
    specs = [LayerSpec({"d": _Dense, "m": _Block}[kind]) for kind in layout]
    model = PipelineModule(specs, num_stages=2, loss_fn=_mse, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if block is not None:
        config["ds_fp4"] = block
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    generator = torch.Generator().manual_seed(1)
    data = iter([tuple(torch.randn(2, 4, WIDTH, generator=generator)) for _ in range(6)])
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(3)]
    found = [name for name, module in engine.module.named_modules() if "ds_fp4_experts" in module.__dict__]
    return losses, found


@pytest.mark.parametrize(
    "layout, block, taken_over",
    [
        ("dmdd", {}, ([1], [])),
        ("dmmd", {"layers": {"1.moe": "fp8", "2.moe": {"experts": {"recompute": "fc1"}}}}, ([1], [2])),
        ("dmmd", {"layers": {"2.moe": "bf16"}}, ([1], [])),
        ("dmmd", {"checkpointing": {"enabled": True, "scope": ["1", "3"]}}, ([1], [2])),
    ],
    ids=("a stage without layers", "patterns for each stage", "a stage in BF16", "checkpointed modules of each stage"),
)
def test_stages_with_different_layers(layout, block, taken_over):
    stock = run_ranks(2, _train, layout, None)
    ours = run_ranks(2, _train, layout, {"enabled": True, **block})
    for (losses, _), (got, found), here in zip(stock, ours, taken_over, strict=True):
        assert found == [f"{number}.moe.deepspeed_moe.experts" for number in here]
        assert got == pytest.approx(losses, rel=0.02) and got != losses


def _refused() -> None:
    _train("dmmd", {"enabled": True, "layers": {"3.moe": "fp8"}})


def test_a_pattern_that_no_stage_has():
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, _refused, timeout=60)
    for error in failure.value.errors:
        for name in ("1.moe", "2.moe"):
            assert f"ds_fp4.layers.3.moe: matches none of the model's MoE layers: {name}" in error
