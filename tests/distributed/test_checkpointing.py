# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""`ds_fp4.checkpointing` through DeepSpeed's engine on 2 ranks: scopes, redirection, routing, what stays as it was."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn

from tests.distributed import models
from tests.distributed.harness import RankFailure, device_for, run_ranks

KINDS = ("classic", "autoep")


def _block(checkpointing: dict | None, recipe: str = "bf16") -> dict:
    extra = {} if checkpointing is None else {"checkpointing": {"enabled": True, "format": "mxfp4", **checkpointing}}
    return {"enabled": True, "recipe": recipe, **extra}


def _engine(kind: str, block: dict | None, model: dict | None = None, enable: dict | None = None, **config):
    if kind == "classic":
        return models.build(models.classic_model(**(model or {})), models.ds_config(block, **config))
    module = (models.llama if kind == "dense" else models.mixtral)(**(model or {}))
    if enable is not None:
        module.gradient_checkpointing_enable(**enable)
    return models.build(module, models.ds_config(block, ep_size=None if kind == "dense" else 2, **config))


STEPS = 3


def _train(engine, steps: int = STEPS) -> list[float]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(7 + rank)
    losses = models.train(engine, models.batches(steps, rank))
    return losses + [parameter.float().sum().item() for parameter in engine.module.parameters()]


def _same(found: list, expected: list) -> None:
    """Equal to the bit; on GPUs, where PyTorch's own backward adds in any order, close."""
    if device_for(2) == "cpu":
        assert found == expected
    else:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0.01, atol=0.01)


def _checkpointed(engine) -> list[str]:
    from ds_fp4.integrations.checkpointing import CheckpointedModule

    return [name for name, module in engine.module.named_modules() if isinstance(module, CheckpointedModule)]


def _all_cases(cases: list[tuple], import_ds_fp4: bool = True) -> list[tuple[list[float], list[str]]]:
    if import_ds_fp4:
        import ds_fp4 as _  # noqa: F401
    results = []
    for kind, block, options in cases:
        engine = _engine(kind, block, **options)
        results.append((_train(engine), _checkpointed(engine) if import_ds_fp4 else []))
        engine.destroy()
    return results


LAYERS = {"classic": ["blocks.0", "blocks.1"], "autoep": ["model.layers.0", "model.layers.1"]}
EXPERTS = {
    "classic": [f"blocks.{i}.moe.deepspeed_moe.experts" for i in range(2)],
    "autoep": [f"model.layers.{i}.mlp.experts" for i in range(2)],
}
CASES = [
    # kind, checkpointing, recipe, names, options
    *(
        (kind, dict(scope=scope, **more), "bf16", names[kind], dict(dtype="fp32"))
        for kind in KINDS
        for scope, names in (("layers", LAYERS), ("experts", EXPERTS))
        for more in (dict(), dict(exact=False), dict(format="fp8", offload="cpu"))
    ),
    (
        "autoep",
        dict(scope=["*.self_attn", "*.mlp"]),
        "bf16",
        ["model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.1.mlp"],
        {},
    ),
    ("autoep", dict(scope=["model.layers.1*"]), "bf16", ["model.layers.1"], {}),
    ("autoep", dict(scope="layers"), "mxfp4", LAYERS["autoep"], dict(zero=1)),
    ("autoep", dict(scope="layers", exact=False), "mxfp4", LAYERS["autoep"], dict(zero=2, accumulation=2)),
    ("autoep", dict(scope="layers"), "bf16", LAYERS["autoep"], dict(zero=3)),
    ("autoep", dict(scope="experts", exact=False), "fp8", EXPERTS["autoep"], dict(zero=3)),
    ("classic", dict(scope="layers", exact=False), "mxfp4", LAYERS["classic"], dict(zero=1)),
    ("classic", dict(scope="layers"), "mxfp4", LAYERS["classic"], dict(model=dict(k=1, noisy_gate_policy="RSample"))),
    (
        "classic",
        dict(scope="layers", exact=False),
        "bf16",
        LAYERS["classic"],
        dict(model=dict(k=1, drop_tokens=False)),
    ),
    ("classic", dict(scope="layers", exact=False), "bf16", LAYERS["classic"], dict(model=dict(k=3))),
    ("classic", dict(scope="layers", exact=False), "bf16", LAYERS["classic"], dict(model=dict(drop_tokens=False))),
    ("classic", dict(scope="experts"), "mxfp4", EXPERTS["classic"], dict(zero=2)),
]


def test_every_combination_trains_like_bf16():
    # Cases that differ in their block only have one reference.
    plain, references = [], []
    for kind, _, _, _, options in CASES:
        if (kind, None, options) not in plain:
            plain.append((kind, None, options))
        references.append(plain.index((kind, None, options)))
    stock = run_ranks(2, _all_cases, plain, False, timeout=400)
    packed = run_ranks(
        2,
        _all_cases,
        [(kind, _block(checkpointing, recipe), options) for kind, checkpointing, recipe, _, options in CASES],
        timeout=400,
    )
    for number, (kind, checkpointing, _, names, options) in enumerate(CASES):
        for rank in range(2):
            (reference, _), (losses, found) = stock[rank][references[number]], packed[rank][number]
            reference, losses = torch.tensor(reference[:STEPS]), torch.tensor(losses[:STEPS])
            assert found == names
            assert torch.isfinite(losses).all() and not torch.equal(losses, reference), (kind, checkpointing, options)
            assert (losses - reference).abs().max() < 0.05 * reference.abs().max(), (kind, checkpointing, options)
            if checkpointing.get("exact") is False and options.get("dtype") == "fp32":
                assert losses[0] == reference[0], "an inexact forward sees the original values"


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        from ds_fp4.packing import Format, Packer

        view, buffer = Packer(Format()).pack(x)
        return view.of(view.run.decode(buffer))

    @staticmethod
    def backward(ctx, grad):
        return grad


def _on_unpacked_inputs(kind: str, names: list[str], **options) -> list[float]:
    """Training without checkpointing, where the named modules see what packing makes of their first argument."""
    import ds_fp4 as _  # noqa: F401

    engine = _engine(kind, None, **options)
    for name in names:
        engine.module.get_submodule(name).register_forward_pre_hook(
            lambda module, args: (_StraightThrough.apply(args[0]), *args[1:])
        )
    return _train(engine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope, names", (("layers", LAYERS), ("experts", EXPERTS)))
def test_exact_is_training_on_unpacked_inputs_to_the_bit(kind, scope, names):
    expected = run_ranks(2, _on_unpacked_inputs, kind, names[kind])
    found = run_ranks(2, _all_cases, [(kind, _block(dict(scope=scope)), {})])
    _same([rank[0][0] for rank in found], expected)


def _hugging_face(cases: list[tuple[dict, dict | None, dict | None]]) -> list[list[float]]:
    import ds_fp4 as _  # noqa: F401

    results = []
    for checkpointing, before, after in cases:
        engine = _engine("autoep", _block(checkpointing), enable=before)
        if after is not None:
            engine.module.gradient_checkpointing_enable(**after)
        results.append(_train(engine))
        engine.destroy()
    return results


def test_gradient_checkpointing_enable_goes_through_ds_fp4():
    head = dict(scope=["model.embed_tokens"])  # has nothing to pack: the layers are transformers' business
    reentrant, not_reentrant = (
        dict(gradient_checkpointing_kwargs={"use_reentrant": value}) for value in (True, False)
    )
    plain = dict(scope="layers")
    cases = [
        (plain, None, None), (plain, not_reentrant, None), (plain, reentrant, None), (plain, None, {}),
        (head, None, None),
        (head, not_reentrant, None), (head, reentrant, None), (head, None, not_reentrant), (head, {}, {}),
        (head, dict(every_n_layers=2), None), (head, dict(offload=True), None),
        (dict(scope="layers", exact=False), None, None), (dict(exact=False), {}, None),
    ]  # fmt: skip
    for rank in run_ranks(2, _hugging_face, cases, timeout=300):
        layers, *same = rank[:4]
        for losses in same:
            _same(losses, layers)
        nothing, *packed, every_second, offloaded = rank[4:11]
        for losses in (*packed, offloaded):
            _same(losses, layers)
        assert nothing != layers and every_second not in (nothing, layers)
        _same(rank[11], rank[12])
        assert rank[11] != layers


def _dense_models() -> tuple[list[list[float]], list[list[str]]]:
    import ds_fp4 as _  # noqa: F401

    losses, names = [], []
    for checkpointing, enable in (
        (None, None),
        (dict(scope=["model.layers.*"]), None),
        (dict(scope=[]), {}),
        (dict(scope=[]), None),
    ):
        # Without a recipe: the default one asks for nothing.
        block = (
            None if checkpointing is None else {"enabled": True, "checkpointing": {"enabled": True, **checkpointing}}
        )
        engine = _engine("dense", block, enable=enable)
        names.append(_checkpointed(engine))
        losses.append(_train(engine))
        engine.destroy()
    return losses, names


def test_models_without_moe_layers_can_be_checkpointed():
    for (stock, by_name, by_hugging_face, nothing), names in run_ranks(2, _dense_models):
        _same(by_hugging_face, by_name)
        _same(nothing, stock)
        assert by_name != stock and torch.tensor(by_name).isfinite().all()
        assert names == [[], ["model.layers.0", "model.layers.1"], [], []]


def _refused_on_dense(blocks: list[dict]) -> list[str]:
    import ds_fp4 as _  # noqa: F401

    texts = []
    for block in blocks:
        try:
            _engine("dense", block)
        except RuntimeError as error:
            texts.append(str(error))
    return texts


def test_what_only_moe_layers_can_do_is_refused_without_them():
    blocks = [_block({}, "bf16"), _block(dict(scope=["*"]), "mxfp4"), _block(None)]
    for scope, recipe, nothing in run_ranks(2, _refused_on_dense, blocks):
        assert 'ds_fp4.checkpointing.scope = "layers" is found by MoE layers' in scope
        assert "ds_fp4.recipe: the model has no MoE layer" in recipe and "leave ds_fp4.recipe out" in recipe
        assert "ds_fp4.enabled is true, but the model has no MoE layer" in nothing


def _deepspeed_function(cases: list[tuple[dict, dict]]) -> list[tuple[list[float], int, int]]:
    import deepspeed

    import ds_fp4 as _  # noqa: F401
    from ds_fp4 import checkpointing as module

    calls = []
    original = module.torch_checkpoint
    module.torch_checkpoint = lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
    results = []
    for checkpointing, model in cases:
        engine = _engine("classic", _block(checkpointing), model=model, dtype="fp32")
        calls.clear()
        losses = _train(engine)
        count = len(calls)
        # Outside of the engine's model DeepSpeed's function is DeepSpeed's.
        x = torch.randn(64, 64, requires_grad=True)
        deepspeed.checkpointing.checkpoint(torch.sin, x).sum().backward()
        assert torch.equal(x.grad, x.cos())
        results.append((losses[:STEPS], count, len(calls)))
        engine.destroy()
    return results


def test_deepspeeds_checkpoint_goes_through_ds_fp4():
    itself = dict(checkpoint="deepspeed")
    cases = [(dict(scope="layers"), {}), (dict(scope=["embedding"]), itself), (dict(scope="layers"), itself)]
    for (losses, count, after), (others, other_count, other_after), (twice, twice_count, _) in run_ranks(
        2, _deepspeed_function, cases
    ):
        # 2 layers a step, and the embedding's call, which has no tensor to pack
        assert count == after == 2 * STEPS and other_count == other_after == 3 * STEPS
        torch.testing.assert_close(losses, others, rtol=1e-5, atol=0)
        # A layer that checkpoints itself and is checkpointed by name is recomputed once.
        assert twice_count == 2 * STEPS
        torch.testing.assert_close(losses, twice, rtol=1e-5, atol=0)


def _random_states() -> list[bool]:
    """Model-parallel random states in a recomputation: dropout under DeepSpeed's tracker."""
    from deepspeed.runtime.activation_checkpointing import checkpointing as ds

    import ds_fp4 as _  # noqa: F401
    from ds_fp4.checkpointing import CheckpointOptions, redirecting
    from ds_fp4.integrations.checkpointing import _install_deepspeed_shim

    _install_deepspeed_shim()
    tracker = ds.get_cuda_rng_tracker()
    tracker.set_states({"here": torch.arange(4)})
    seen = []

    def function(x):
        seen.append(tracker.get_states()["here"].clone())
        tracker.set_states({"here": tracker.get_states()["here"] + 1})
        return x.sin()

    x = torch.randn(64, 64, requires_grad=True)
    with redirecting(CheckpointOptions()):
        y = ds.checkpoint(function, x)
        z = ds.checkpoint(lambda a, b: (a.sin(), b), x, 3)
    assert z[1] == 3
    after_forward = tracker.get_states()["here"].clone()
    y.sum().backward()
    return [torch.equal(seen[0], seen[1]), torch.equal(tracker.get_states()["here"], after_forward), len(seen) == 2]


def test_model_parallel_random_states():
    assert run_ranks(1, _random_states) == [[True, True, True]]


def _routing(exact: bool, one_sided: bool) -> tuple[list[bool], int, list[tuple[int, int]]]:
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter

    import ds_fp4 as _  # noqa: F401
    from ds_fp4.checkpointing import recomputing
    from ds_fp4.traffic import AllToAllTraffic

    engine = _engine("autoep", _block(dict(scope="layers", exact=exact)), dtype="fp32")
    if one_sided:
        for layer in engine.module.model.layers:  # every token to experts 0 and 1, which rank 0 holds
            with torch.no_grad():
                layer.mlp.router.gate.weight[2:] = layer.mlp.router.gate.weight[:2] * 1e-3
                layer.mlp.router.gate.weight[:2] += 1.0
    original = TokenChoiceTopKRouter.forward
    forward, recomputed, free = {}, {}, {}

    def watching(self, x, *args):
        result = original(self, x, *args)
        (recomputed if recomputing() else forward)[self] = result[1].clone()
        with torch._C.DisableTorchFunction():
            free[self] = original(self, x.detach(), *args)[1]
        return result

    TokenChoiceTopKRouter.forward = watching
    same, flips, counts = [], 0, []
    try:
        for tokens in models.batches(4, torch.distributed.get_rank(), micro_batch=4, length=32):
            with AllToAllTraffic() as traffic:
                engine.backward(models.loss_of(engine, tokens))
            engine.step()
            same += [torch.equal(forward[router], recomputed[router]) for router in forward]
            flips += sum((free[router] != forward[router]).sum().item() for router in forward)
            counts.append((traffic.forward.payload.bytes, traffic.recompute.payload.bytes))
    finally:
        TokenChoiceTopKRouter.forward = original
    return same, flips, counts


@pytest.mark.parametrize("one_sided", (False, True))
@pytest.mark.parametrize("exact", (True, False))
def test_routing_is_kept_across_ranks(exact, one_sided):
    for same, flips, counts in run_ranks(2, _routing, exact, one_sided):
        assert len(same) == 8 and all(same)
        assert exact == (flips == 0) or one_sided, "routing would not have changed: this shows nothing"
        for forward, recomputed in counts:
            # What needs no recomputation is not sent again: the combine of a layer, of two equal legs, at most.
            assert 0 < recomputed <= forward


def _stays(kind: str, folder: str) -> tuple:
    import ds_fp4 as _  # noqa: F401

    rank = torch.distributed.get_rank()
    data = models.batches(4, rank)
    stock = _engine(kind, None, zero=1)
    names = sorted(stock.module.state_dict())
    stock.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        evaluated = models.loss_of(stock, data[0]).item()
    stock.destroy()
    engine = _engine(kind, _block(dict(scope="layers", offload="cpu")), zero=1)
    engine.eval()
    torch.manual_seed(1)
    with torch.no_grad():
        assert models.loss_of(engine, data[0]).item() == evaluated
    engine.train()
    models.train(engine, data[:2])
    engine.save_checkpoint(folder)
    torch.manual_seed(5)
    expected = models.train(engine, data[2:])
    same_names = sorted(engine.module.state_dict()) == names and type(engine.module).__name__ in (
        "ClassicModel",
        "MixtralForCausalLM",
    )
    engine.destroy()
    resumed = _engine(kind, _block(dict(scope="layers")), zero=1)
    resumed.load_checkpoint(folder)
    torch.manual_seed(5)
    again = models.train(resumed, data[2:])
    resumed.destroy()
    other = _engine(kind, None, zero=1)
    other.load_checkpoint(folder)
    torch.manual_seed(5)
    return expected, again, models.train(other, data[2:]), same_names


@pytest.mark.parametrize("kind", KINDS)
def test_names_eval_and_saved_checkpoints_stay_as_they_are(kind, tmp_path):
    for expected, again, stock, same_names in run_ranks(2, _stays, kind, str(tmp_path), timeout=240):
        _same(expected, again)
        assert same_names and stock != expected
        torch.testing.assert_close(stock, expected, rtol=0.05, atol=0)


def _second_engine() -> tuple[list[str], list[str], list[bool]]:
    import ds_fp4 as _  # noqa: F401
    from ds_fp4.integrations.checkpointing import _INSTALLED, _Installed, _Redirected

    model = models.mixtral()
    model.gradient_checkpointing_enable()
    first = models.build(model, models.ds_config(_block(dict(scope="experts"), "mxfp4"), ep_size=2))
    found = _checkpointed(first)
    redirected = [isinstance(layer._gradient_checkpointing_func, _Redirected) for layer in model.model.layers]
    first.destroy()
    second = models.build(model, models.ds_config(None))
    restored = [not isinstance(layer._gradient_checkpointing_func, _Redirected) for layer in model.model.layers]
    restored += [
        not any(_INSTALLED in module.__dict__ for module in model.modules()),
        not any(
            isinstance(getattr(hook, "__self__", None), _Installed)
            for hook in (*model._forward_hooks.values(), *model._forward_pre_hooks.values())
        ),
    ]
    return found, _checkpointed(second), redirected + restored


def test_a_later_engine_without_a_block_gets_stock_modules_back():
    for first, second, checks in run_ranks(2, _second_engine):
        assert first == EXPERTS["autoep"] and second == [] and all(checks)


def _experts_that_save_for_themselves() -> tuple[list[str], list[str], list[float]]:
    from ds_fp4.integrations.expert_level import ExpertLevelLayer

    names, losses = [], []
    for scope in ("experts", "layers"):
        engine = _engine("autoep", _block(dict(scope=scope), "mxfp4"), model=dict(intermediate_size=128))
        assert all(isinstance(layer.mlp, ExpertLevelLayer) for layer in engine.module.model.layers)
        names.append(_checkpointed(engine))
        losses += _train(engine)[:STEPS]
        engine.destroy()
    return *names, losses


def test_no_second_copy_is_kept_of_what_the_expert_level_keeps():
    for experts, layers, losses in run_ranks(2, _experts_that_save_for_themselves):
        assert experts == [] and layers == LAYERS["autoep"] and torch.tensor(losses).isfinite().all()


ENABLED = dict(gradient_checkpointing_kwargs=dict(use_reentrant=False))
EXPERT_LEVEL_CASES = {
    # name: checkpointing, ZeRO stage, gradient_checkpointing_enable
    "none": (None, 1, None),
    "layers": (dict(scope="layers"), 1, None),
    "layers, ZeRO 2": (dict(scope="layers"), 2, None),
    "layers, ZeRO 3": (dict(scope="layers"), 3, None),
    "transformers' layers": (dict(scope=[]), 1, ENABLED),
    "layers and transformers' layers": (dict(scope="layers"), 2, ENABLED),
    "transformers' layers, ZeRO 3": (dict(scope=[]), 3, ENABLED),
    "inexact": (dict(scope="layers", exact=False), 1, None),
    "inexact, ZeRO 3": (dict(scope="layers", exact=False), 3, None),
    "patterns": (dict(scope=["*.self_attn", "*.mlp"], offload="cpu", exact=False), 3, None),
    "experts by name": (dict(scope=["*.mlp.experts"]), 1, None),
}


def _expert_level_cases() -> dict[str, list[float]]:
    from ds_fp4.integrations.expert_level import ExpertLevelLayer

    losses = {}
    for name, (checkpointing, zero, enable) in EXPERT_LEVEL_CASES.items():
        block = _block(checkpointing, "mxfp4")
        engine = _engine("autoep", block, model=dict(intermediate_size=128), enable=enable, zero=zero)
        assert all(isinstance(layer.mlp, ExpertLevelLayer) for layer in engine.module.model.layers)
        losses[name] = _train(engine)[:STEPS]
        engine.destroy()
    return losses


def test_the_expert_level_is_recomputed_as_it_was_computed():
    for losses in run_ranks(2, _expert_level_cases, timeout=400):
        for name in EXPERT_LEVEL_CASES:
            torch.testing.assert_close(torch.tensor(losses[name]), torch.tensor(losses["none"]), rtol=0.02, atol=0)
            if "layers" in name:
                _same(losses[name], losses["layers"])
            elif "inexact" in name or name == "patterns":
                _same(losses[name][:1], losses["none"][:1])
        assert losses["layers"] != losses["none"]
        # The records are MXFP4 already: packing them changes nothing.
        _same(losses["experts by name"], losses["none"])


def _refused(block: dict, config: dict, configure: dict | None) -> None:
    import deepspeed

    import ds_fp4 as _  # noqa: F401

    engine = _engine("classic", block, model=dict(checkpoint="deepspeed"), **config)
    if configure:
        deepspeed.checkpointing.configure(None, **configure)
    _train(engine)


REFUSED = [
    (
        dict(scope=["block.0"]),
        {},
        None,
        "ds_fp4.checkpointing.scope: block.0: matches no module. Similar names: blocks.0",
    ),
    (
        {},
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        None,
        "activation_checkpointing.cpu_checkpointing = True cannot be combined with ds_fp4.checkpointing.enabled = "
        "true, which keeps activations in a form of its own. Set activation_checkpointing.cpu_checkpointing to false; "
        "ds_fp4.checkpointing.offload = "
        '"cpu" does that',
    ),
    (
        dict(scope=["embedding"]),
        {},
        dict(partition_activations=True),
        "deepspeed.checkpointing.configure(partition_activations=True)",
    ),
]


@pytest.mark.parametrize("checkpointing, config, configure, message", REFUSED, ids=[case[-1][:30] for case in REFUSED])
def test_what_cannot_work_is_refused_on_every_rank(checkpointing, config, configure, message):
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, _refused, _block(checkpointing), config, configure, timeout=60)
    assert all(error is not None and message in error for error in failure.value.errors)


def _different_blocks() -> None:
    import ds_fp4 as _  # noqa: F401

    rank = torch.distributed.get_rank()
    _engine("classic", _block(dict(scope="experts" if rank else "layers", exact=bool(rank))))


def test_ranks_that_differ_are_named():
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, _different_blocks, timeout=60)
    for error in failure.value.errors:
        assert 'ds_fp4.checkpointing.scope: "layers" on rank 0; "experts" on rank 1' in error
        assert "ds_fp4.checkpointing.exact: false on rank 0; true on rank 1" in error


def _tensors() -> int:
    """Values in tensors other than parameters; the least of a while, as gloo's threads let go of theirs late."""
    counts = []
    for _ in range(5):
        time.sleep(0.04)
        gc.collect()
        counts.append(
            sum(o.numel() for o in gc.get_objects() if isinstance(o, torch.Tensor) and not isinstance(o, nn.Parameter))
        )
    return min(counts)


def _tensors_after_steps(kind: str, checkpointing: dict | None, model: dict) -> list[int]:
    import ds_fp4 as _  # noqa: F401

    gc.freeze()  # what libraries have made by now: most of what the collector would look at
    engine = _engine(kind, _block(checkpointing), model=model)
    _StraightThrough.apply(torch.ones(64, 64, dtype=torch.bfloat16))  # the format's tables are made once
    counts = []
    for step, tokens in enumerate(models.batches(6, torch.distributed.get_rank())):
        engine.backward(models.loss_of(engine, tokens))
        if step in (1, 5):
            counts.append(_tensors())
        engine.step()
    return counts


@pytest.mark.parametrize("kind, model", (("autoep", {}), ("classic", {}), ("classic", dict(checkpoint="deepspeed"))))
def test_nothing_is_left_after_backward(kind, model):
    stock = run_ranks(2, _tensors_after_steps, kind, None, model)
    for checkpointing in (dict(scope="layers"), dict(scope="layers", exact=False, offload="cpu")):
        packed = run_ranks(2, _tensors_after_steps, kind, checkpointing, model)
        for before, after in zip(stock, packed, strict=True):
            assert after[-1] <= after[0] and after[-1] <= before[-1] + 1000, (before, after)


def _losses_of_the_gate() -> list[bool]:
    import ds_fp4 as _  # noqa: F401

    engine = _engine("classic", _block(dict(scope="layers")))
    layers = [block.moe.deepspeed_moe for block in engine.module.blocks]
    loss = models.loss_of(engine, models.batches(1, 0)[0])
    before = [layer.l_aux for layer in layers]
    engine.backward(loss)
    return [layer.l_aux is held for layer, held in zip(layers, before, strict=True)]


def test_recomputing_leaves_the_gates_loss_alone():
    assert run_ranks(2, _losses_of_the_gate) == [[True, True]] * 2


def _compiled(kind: str) -> tuple[list[float], list[float]]:
    import ds_fp4 as _  # noqa: F401

    data = models.batches(3, torch.distributed.get_rank())
    losses = []
    for compiled in (False, True):
        engine = _engine(kind, _block(dict(scope="layers"), "mxfp4"))
        if compiled:
            engine.compile(backend="aot_eager")
        torch.manual_seed(3)
        losses.append(models.train(engine, data))
        engine.destroy()
    return losses[0], losses[1]


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_models(kind):
    for eager, compiled in run_ranks(2, _compiled, kind):
        torch.testing.assert_close(compiled, eager, rtol=0.02, atol=0)


class _Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, item: int) -> dict:
        tokens = torch.randint(0, models.VOCABULARY, (16,), generator=torch.Generator().manual_seed(item))
        return {"input_ids": tokens, "labels": tokens}


def _trainer(folder: str, checkpointing: dict, gradient_checkpointing: bool) -> list[float]:
    from transformers import Trainer, TrainingArguments

    import ds_fp4 as _  # noqa: F401

    config = models.ds_config(_block(checkpointing), ep_size=2)
    config.update(
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        bf16={"enabled": "auto"},
    )
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=3,
        logging_steps=1,
        report_to=[],
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        deepspeed=config,
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=gradient_checkpointing,
    )
    trainer = Trainer(models.mixtral(), arguments, train_dataset=_Tokens())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_hugging_face_trainer(tmp_path):
    by_name = run_ranks(2, _trainer, str(tmp_path), dict(scope="layers"), False)
    by_flag = run_ranks(2, _trainer, str(tmp_path), dict(scope=["model.embed_tokens"]), True)
    both = run_ranks(2, _trainer, str(tmp_path), dict(scope="layers"), True)
    _same(by_name, by_flag)
    _same(by_name, both)
    assert all(len(losses) == 3 for losses in by_name)


def _router_logits(checkpointing: dict | None) -> float:
    import ds_fp4 as _  # noqa: F401

    engine = _engine("autoep", _block(checkpointing))
    tokens = models.batches(1, torch.distributed.get_rank())[0]
    output = engine(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=True)
    engine.backward(output.loss)
    assert len(output.router_logits) == 2
    return float(output.aux_loss)


def test_router_logits_are_recorded_once():
    stock = run_ranks(2, _router_logits, None)
    _same(run_ranks(2, _router_logits, dict(scope="layers", exact=False)), stock)


def _summary() -> str:
    import ds_fp4.engine as hook
    from ds_fp4.startup import Announcement
    from ds_fp4.summary import summary_lines

    engine = models.build(models.mixtral(num_hidden_layers=3), models.ds_config(ep_size=2))
    plan = hook.make_plan(
        {"ds_fp4": _block(dict(scope="experts", format="fp8", offload="cpu"))},
        engine.module,
        torch.device("cpu"),
        Announcement("test"),
    )
    return "\n".join(summary_lines(plan))


def test_summary_says_what_is_checkpointed():
    assert (
        "checkpointed, inputs kept in fp8 in host memory, forward on the same values: model.layers.{0-2}.mlp.experts"
        in run_ranks(2, _summary)[0]
    )
