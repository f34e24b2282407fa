# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The expert level through `deepspeed.moe.layer.MoE` with `ds_fp4.nn.SwiGLUExpert`, in DeepSpeed's engine.

What a gate can do is tested on one rank (tests/unit/test_expert_level_classic.py); here it is the exchange, ZeRO and
checkpointing. Without quantization everything must agree with DeepSpeed in FP32.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed import models
from tests.distributed.harness import RankFailure, run_ranks

SWIGLU = dict(intermediate=128)


def _engine(block: dict | None, model: dict, **config):
    """An engine whose experts all differ (DeepSpeed's are copies of one), the same on every run."""
    network = models.classic_model(**{"swiglu": SWIGLU, **model})
    for number, layer in enumerate(block.moe for block in network.blocks):
        first = layer.num_local_experts * (torch.distributed.get_rank() % layer.ep_size)
        for local, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            generator = torch.Generator().manual_seed(100 * number + first + local)
            for parameter in expert.parameters():
                torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return models.build(network, models.ds_config(block, **config))


def _steps(exact: bool, case: dict) -> tuple[list[float], dict, float]:
    """Losses of two micro-steps, all gradients of both, and the loss after the optimizer's step."""
    import ds_fp4 as _  # noqa: F401
    from tests.distributed.exact_experts import experts_of, gradients_of, make_exact

    case = dict(case)
    block = {"enabled": True, "recipe": "mxfp4", "experts": case.pop("experts", {})} if exact else None
    engine = _engine(block, case.pop("model"), dtype="fp32", accumulation=2, **case)
    rank = torch.distributed.get_rank()
    experts = experts_of(engine)
    assert len(experts) == (2 if exact else 0)
    for each in experts:
        make_exact(each)
    torch.manual_seed(7 + rank)  # noisy gates
    data = models.batches(3, rank)
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


def _stock_and_exact(cases: list[dict]) -> list[tuple]:
    return [(_steps(False, case), _steps(True, case)) for case in cases]


PARITY = {
    2: [
        dict(zero=0, model=dict(k=1, drop_tokens=False, noisy_gate_policy="RSample")),
        dict(zero=1, model=dict(k=1, checkpoint="reentrant")),
        dict(zero=1, model=dict(k=2, drop_tokens=False, use_residual=True)),
        dict(zero=2, model=dict(k=2, num_experts=2)),  # one expert a rank
        dict(zero=2, model=dict(k=3, num_experts=8, checkpoint="non-reentrant")),
        dict(zero=0, model=dict(k=2, ep_size=1)),
        dict(zero=2, model=dict(k=3, ep_size=1)),
        dict(
            zero=0,
            model=dict(k=3, checkpoint="deepspeed", swiglu=dict(intermediate=256, activation="swiglu_oai", limit=0.5)),
            experts={"recompute": "fc1"},
        ),
    ],
    4: [dict(zero=1, model=dict(k=2)), dict(zero=2, model=dict(k=3, ep_size=4))],
}


@pytest.mark.parametrize("world_size", PARITY)
def test_without_quantization_everything_is_deepspeeds(world_size):
    cases = PARITY[world_size]
    for rank_results in run_ranks(world_size, _stock_and_exact, cases, timeout=300):
        for case, (stock, exact) in zip(cases, rank_results, strict=True):
            (losses, gradients, after), (ours, our_gradients, our_after) = stock, exact
            assert ours == pytest.approx(losses, rel=1e-6), case
            assert our_after == pytest.approx(after, rel=1e-5), case
            assert gradients.keys() == our_gradients.keys()
            for name, gradient in gradients.items():
                assert gradient is not None and our_gradients[name] is not None, (case, name)
                error = (our_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
                assert error < 1e-5, f"{case} {name}: relative error {error:.2e}"


def _train() -> list[list[float]]:
    """Losses of BF16, FP8 and MXFP4."""
    import ds_fp4 as _  # noqa: F401

    rank, found = torch.distributed.get_rank(), []
    for recipe in ("bf16", "fp8", "mxfp4"):
        engine = _engine({"enabled": True, "recipe": recipe}, {}, dtype="bf16", zero=2, accumulation=2)
        torch.manual_seed(7 + rank)
        found.append(models.train(engine, models.batches(6, rank)))
        engine.destroy()
    return found


def test_it_trains_like_bf16():
    for stock, *quantized in run_ranks(2, _train):
        for losses in quantized:
            assert losses != stock
            assert losses == pytest.approx(stock, rel=0.03)


def _build(swiglu: dict | None) -> tuple[int, int, str]:
    """Layers at the expert level, all-to-alls of payload in a forward, what is printed at start."""
    import contextlib
    import io

    import ds_fp4 as _  # noqa: F401
    from ds_fp4.traffic import AllToAllTraffic
    from tests.distributed.exact_experts import experts_of

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = models.build(models.classic_model(swiglu=swiglu), models.ds_config({"enabled": True}))
    with AllToAllTraffic() as traffic:
        models.loss_of(engine, models.batches(1, torch.distributed.get_rank())[0])
    return len(experts_of(engine)), traffic.forward.payload.calls, printed.getvalue()


def _both_kinds_of_experts() -> list[tuple[int, int, str]]:
    return [_build(SWIGLU), _build(None)]


def test_the_summary_says_who_computes_the_experts():
    (layers, calls, summary), (other_layers, other_calls, other_summary) = run_ranks(2, _both_kinds_of_experts)[0]
    assert (layers, calls) == (2, 4)  # dispatch and combine of two layers
    assert "blocks.{0-1}.moe: deepspeed.moe.layer.MoE" in summary and "(expert level)" in summary
    assert (other_layers, other_calls) == (0, 4)
    assert "experts computed by DeepSpeed (codec level)" in other_summary
    assert (
        "not computed in FP8: blocks.{0-1}.moe: its experts are Expert; classic layers get it with "
        "ds_fp4.nn.SwiGLUExpert\n"
    ) in other_summary


def _asked_for_by_name() -> None:
    import ds_fp4 as _  # noqa: F401

    models.build(models.classic_model(), models.ds_config({"enabled": True, "experts": {"compute": "fp8"}}))


def test_experts_that_were_asked_for_and_cannot_be():
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, _asked_for_by_name)
    for error in failure.value.errors:
        assert "blocks.1.moe (deepspeed.moe.layer.MoE) cannot be computed in FP8: its experts are Expert" in error


def _checkpoints(folder: str) -> list[list[float]]:
    """Losses of an engine, and of one that loaded its checkpoint: with the expert level, and without."""
    import ds_fp4 as _  # noqa: F401

    rank = torch.distributed.get_rank()
    tokens = models.batches(4, rank)
    block = {"enabled": True, "recipe": "fp8"}
    options = dict(k=3)
    engine = _engine(block, options, dtype="fp32", zero=1)
    models.train(engine, tokens[:2])
    engine.save_checkpoint(folder, tag="saved")
    found = [models.train(engine, tokens[2:])]
    for other in (block, None):
        engine = _engine(other, {**options, "seed": 5}, dtype="fp32", zero=1)
        models.loss_of(engine, tokens[0])  # FP8 copies of the first weights
        engine.load_checkpoint(folder, tag="saved")
        found.append(models.train(engine, tokens[2:]))
    return found


def test_checkpoints_load_with_and_without(tmp_path):
    for saved, loaded, stock in run_ranks(2, _checkpoints, str(tmp_path)):
        assert loaded == saved
        assert stock != saved
        assert stock == pytest.approx(saved, rel=0.01)
