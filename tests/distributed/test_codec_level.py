# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The codec level through DeepSpeed's own layers: what is sent, what comes out, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import models
from tests.distributed.harness import device_for, run_ranks

MXFP4 = {"enabled": True, "recipe": "mxfp4"}
FP8 = {"enabled": True, "recipe": "fp8"}
BF16 = {"enabled": True, "recipe": "bf16"}
KINDS = ("classic", "autoep")


def _make(kind: str, ds_fp4: dict | None, ep_size: int = 2, model: dict | None = None, **config):
    """An engine of either kind."""
    model = model or {}
    if kind == "classic":
        return models.build(models.classic_model(**{"ep_size": ep_size, **model}), models.ds_config(ds_fp4, **config))
    return models.build(models.mixtral(**model), models.ds_config(ds_fp4, ep_size=ep_size, **config))


def _losses(kind: str, ds_fp4: dict | None, steps: int = 4, use_ds_fp4: bool = True, **options) -> list[float]:
    if use_ds_fp4:
        import ds_fp4 as _  # noqa: F401
    engine = _make(kind, ds_fp4, **options)
    rank = torch.distributed.get_rank()
    losses = models.train(engine, models.batches(steps, rank))
    losses += [parameter.float().sum().item() for parameter in engine.module.parameters()]
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_bit_identical_to_deepspeed(kind):
    stock = run_ranks(2, _losses, kind, None, 4, False)
    assert run_ranks(2, _losses, kind, BF16) == stock
    assert run_ranks(2, _losses, kind, {"enabled": False}) == stock


def _losses_through_shim(kind: str) -> list[float]:
    import ds_fp4.engine
    from ds_fp4.all_to_all import Leg
    from ds_fp4.integrations import autoep, classic
    from ds_fp4.integrations.seam import swap_class

    autoep.install()
    classic.install()
    engine = _make(kind, None)
    layers = ds_fp4.engine.find_layers(engine.module)
    assert len(layers) == 2
    for layer in layers:
        swap_class(layer.module, layer.name, (Leg("dispatch", None, None), Leg("combine", None, None)))
    losses = models.train(engine, models.batches(4, torch.distributed.get_rank()))
    return losses + [parameter.float().sum().item() for parameter in engine.module.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_seam_itself_changes_no_bit(kind):
    assert run_ranks(2, _losses_through_shim, kind) == run_ranks(2, _losses, kind, None, 4, False)


CASES = [
    # what DeepSpeed's layers can be combined with; each must train, finite and close to BF16
    ("classic", MXFP4, dict(dtype="fp32")),
    ("classic", FP8, dict(dtype="bf16", zero=1)),
    ("classic", MXFP4, dict(zero=2, accumulation=2)),
    ("classic", MXFP4, dict(model=dict(k=1, use_residual=True, noisy_gate_policy="RSample"))),
    ("classic", MXFP4, dict(model=dict(k=1, drop_tokens=False))),
    ("classic", MXFP4, dict(model=dict(k=3))),
    ("classic", MXFP4, dict(model=dict(k=2, drop_tokens=False), dtype="fp32")),
    ("classic", MXFP4, dict(model=dict(hidden=100))),
    ("classic", MXFP4, dict(model=dict(checkpoint="reentrant"))),
    ("classic", MXFP4, dict(model=dict(checkpoint="non-reentrant"))),
    ("classic", MXFP4, dict(model=dict(checkpoint="deepspeed"))),
    ("autoep", MXFP4, dict(dtype="fp32", zero=0)),
    ("autoep", MXFP4, dict(zero=1)),
    ("autoep", FP8, dict(zero=2, accumulation=2)),
    ("autoep", MXFP4, dict(zero=3)),
    ("autoep", MXFP4, dict(model=dict(num_experts_per_tok=1))),
    ("autoep", MXFP4, dict(model=dict(hidden_size=80, num_attention_heads=2, num_key_value_heads=1))),
]


# DeepSpeed refuses fp16 on CPU.
FP16_CASES = [("classic", MXFP4, dict(dtype="fp16")), ("autoep", MXFP4, dict(dtype="fp16", zero=1))]


def _all_case_losses(cases: list[tuple], hooked: bool) -> list[list[float]]:
    if hooked:
        import ds_fp4 as _  # noqa: F401
    rank = torch.distributed.get_rank()
    results = []
    for kind, block, options in cases:
        engine = _make(kind, block if hooked else None, **options)
        torch.manual_seed(7 + rank)  # noisy gates
        results.append(models.train(engine, models.batches(6, rank)))
        engine.destroy()
    return results


def test_every_combination_trains_like_bf16():
    cases = CASES + (FP16_CASES if device_for(2) == "cuda" else [])
    stock = run_ranks(2, _all_case_losses, cases, False, timeout=300)
    coded = run_ranks(2, _all_case_losses, cases, True, timeout=300)
    for number, (kind, _, options) in enumerate(cases):
        for rank in range(2):
            reference, losses = torch.tensor(stock[rank][number]), torch.tensor(coded[rank][number])
            assert torch.isfinite(losses).all(), (kind, options)
            assert not torch.equal(losses, reference), f"{kind} {options}: the codec was not used"
            assert (losses - reference).abs().max() < 0.05 * reference.abs().max(), (kind, options, losses, reference)


def _traffic(kind: str, block: dict, ep_size: int) -> dict:
    import ds_fp4 as _  # noqa: F401
    from ds_fp4.traffic import AllToAllTraffic

    engine = _make(
        kind,
        block,
        ep_size=ep_size,
        model=dict(hidden=512, num_experts=8) if kind == "classic" else dict(hidden_size=512, num_local_experts=8),
    )
    tokens = models.batches(1, torch.distributed.get_rank(), micro_batch=4, length=32)[0]
    with AllToAllTraffic() as traffic:
        loss = models.loss_of(engine, tokens)
        engine.backward(loss)
    return {direction: getattr(traffic, direction).payload for direction in ("forward", "backward")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", (2, 4))
def test_bytes_on_the_wire(kind, world):
    bf16 = run_ranks(world, _traffic, kind, BF16, world)
    all_fp4 = {**MXFP4, "all_to_all": {"combine_forward": "mxfp4"}}
    for block, forward in ((MXFP4, 0.392), (all_fp4, 0.27)):
        sent = run_ranks(world, _traffic, kind, block, world)
        for direction, limit in (("forward", forward), ("backward", 0.52)):
            total, reference = (sum(rank[direction].bytes for rank in ranks) for ranks in (sent, bf16))
            assert 0 < total <= limit * reference, (block, direction)
            for rank in sent:
                # 2 layers x (dispatch, combine), one payload collective each
                assert rank[direction].calls == 4, (block, direction)


def _ep_smaller_than_world(kind: str) -> tuple[list[float], int]:
    import ds_fp4 as _  # noqa: F401
    from ds_fp4.integrations.seam import CodecLayer

    engine = _make(kind, MXFP4, ep_size=2, zero=1)
    swapped = sum(isinstance(module, CodecLayer) for module in engine.module.modules())
    return models.train(engine, models.batches(4, torch.distributed.get_rank())), swapped


@pytest.mark.parametrize("kind", KINDS)
def test_expert_parallel_group_smaller_than_the_world(kind):
    coded = run_ranks(4, _ep_smaller_than_world, kind)
    stock = run_ranks(4, _losses, kind, None, 4, False)
    for (losses, swapped), reference in zip(coded, stock, strict=True):
        assert swapped == 2
        torch.testing.assert_close(losses, reference[:4], rtol=0.02, atol=0)


def _nonfinite(kind: str, value: float, leg: str) -> list[bool]:
    import ds_fp4 as _  # noqa: F401

    engine = _make(kind, MXFP4, dtype="bf16")
    rank = torch.distributed.get_rank()
    good = models.loss_of(engine, models.batches(1, rank)[0])
    weight = engine.module.embedding.weight if kind == "classic" else engine.module.model.embed_tokens.weight
    if leg == "dispatch":
        # the row after normalization must stay non-finite, whatever the norm does with infinity
        with torch.no_grad():
            weight[:, 0] = value
    else:
        expert = [
            module
            for name, module in engine.module.named_modules()
            if name.endswith("deepspeed_experts.0") or name.endswith("mlp.experts")
        ][0]
        with torch.no_grad():
            next(expert.parameters()).fill_(value)
    bad = models.loss_of(engine, models.batches(1, rank)[0])
    return [bool(torch.isfinite(good)), bool(torch.isfinite(bad))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("leg", ("dispatch", "combine"))
def test_nonfinite_values_reach_the_loss(kind, value, leg):
    assert run_ranks(2, _nonfinite, kind, value, leg) == [[True, False]] * 2


def _odd_layouts(name: str) -> list[bool]:
    import ds_fp4 as _  # noqa: F401
    from ds_fp4.all_to_all import Leg, codec_all_to_all
    from ds_fp4.codec import make_codec

    codec = make_codec(name, 64, "even")
    leg = Leg("dispatch", codec, codec)
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).t().requires_grad_()
    same = []
    for splits in (None, [2, 2]):
        out = codec_all_to_all(rows, leg, None, splits, splits)
        same.append(torch.equal(out, codec_all_to_all(rows.contiguous(), leg, None, splits, splits)))
        rows.grad = None
        out.sum().backward()  # a gradient with strides of 0
        same.append(torch.equal(rows.grad, torch.ones(4, 64)))
    return same


@pytest.mark.parametrize("name", ("mxfp4", "fp8"))
def test_rows_and_gradients_of_any_layout(name):
    assert run_ranks(2, _odd_layouts, name) == [[True] * 4] * 2
