# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level through DeepSpeed's AutoEP layers.

With exact pieces in place of the quantizing ones, everything must agree with DeepSpeed in FP32 (BF16 routing flips
between implementations, so that nothing could be compared there).
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed import models
from tests.distributed.harness import run_ranks

BLOCK = {"enabled": True, "recipe": "mxfp4"}
SIZES = dict(hidden_size=128, intermediate_size=128, num_local_experts=8)


def _step(exact: bool, case: dict) -> tuple[list[float], dict, float]:
    """Losses of two micro-steps, all gradients, and the loss after the optimizer's step."""
    if exact:
        import ds_fp4 as _  # noqa: F401
    from tests.distributed.exact_experts import experts_of, gradients_of, make_exact

    case = dict(case)
    checkpoint = case.pop("checkpoint", None)
    model = models.mixtral(**{**SIZES, **case.pop("model", {})})
    block = {**BLOCK, "experts": case.pop("experts", {})} if exact else None
    config = models.ds_config(block, dtype="fp32", accumulation=2, **case)
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    engine = models.build(model, config)
    if exact:
        experts = experts_of(engine)
        assert len(experts) == 2, "the expert level did not take the layers over"
        for each in experts:
            make_exact(each)
    data = models.batches(3, torch.distributed.get_rank())
    losses = []
    for tokens in data[:2]:
        loss = models.loss_of(engine, tokens)
        engine.backward(loss)
        if len(losses) == 1:
            gradients = gradients_of(engine)
        engine.step()
        losses.append(loss.item())
    after = models.loss_of(engine, data[2]).item()
    engine.destroy()
    return losses, gradients, after


def _both(cases: list[dict], exact: bool) -> list[tuple]:
    return [_step(exact, case) for case in cases]


PARITY = {
    2: [
        dict(ep_size=1, zero=0),
        dict(ep_size=2, zero=1),
        dict(ep_size=2, zero=2, checkpoint="non-reentrant"),
        dict(ep_size=2, zero=3),
        dict(ep_size=2, zero=1, experts={"recompute": "fc1"}, checkpoint="reentrant"),
        dict(ep_size=2, zero=1, model=dict(num_experts_per_tok=1)),
        dict(ep_size=2, zero=1, model=dict(num_experts_per_tok=8)),
    ],
    4: [dict(ep_size=2, zero=1), dict(ep_size=2, zero=3, checkpoint="non-reentrant"), dict(ep_size=4, zero=2)],
}


@pytest.mark.parametrize("world_size", PARITY)
def test_without_quantization_everything_is_deepspeeds(world_size):
    cases = PARITY[world_size]
    stock = run_ranks(world_size, _both, cases, False, timeout=400)
    exact = run_ranks(world_size, _both, cases, True, timeout=400)
    for number, case in enumerate(cases):
        for rank in range(world_size):
            (losses, gradients, after), (ours, our_gradients, our_after) = stock[rank][number], exact[rank][number]
            assert ours == pytest.approx(losses, rel=1e-6), case
            assert our_after == pytest.approx(after, rel=1e-5), case
            assert gradients.keys() == our_gradients.keys()
            largest = max(gradient.norm() for gradient in gradients.values())
            for name, gradient in gradients.items():
                assert gradient is not None and our_gradients[name] is not None, (case, name)
                # Top-1 scores are normalized to 1, and the router's gradient is nothing but rounding.
                error = (our_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-3 * largest)
                assert error < 1e-5, f"{case} {name}: relative error {error:.2e}"
