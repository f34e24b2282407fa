# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Ways of training that users already have, unchanged by ds_fp4: checkpoints, eval, compile, Trainer, Accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.distributed import models
from tests.distributed.harness import free_port, run_ranks

MXFP4 = {"enabled": True, "recipe": "mxfp4"}
KINDS = ("classic", "autoep")


def _engine(kind: str, block: dict | None, **config):
    if kind == "classic":
        return models.build(models.classic_model(), models.ds_config(block, **config))
    return models.build(models.mixtral(), models.ds_config(block, ep_size=2, **config))


def _swapped(engine) -> list[str]:
    from ds_fp4.integrations.seam import CodecLayer

    return [module.ds_fp4_name for module in engine.module.modules() if isinstance(module, CodecLayer)]


def _resume(kind: str, folder: str, saved_with: dict | None, loaded_with: dict | None) -> tuple[list, list, bool]:
    import ds_fp4  # noqa: F401

    rank = torch.distributed.get_rank()
    data = models.batches(6, rank)
    engine = _engine(kind, saved_with, zero=1)
    models.train(engine, data[:3])
    engine.save_checkpoint(folder)
    names = sorted(engine.module.state_dict())
    torch.manual_seed(5)  # the classic layer's gate samples
    expected = models.train(engine, data[3:])
    engine.destroy()
    resumed = _engine(kind, loaded_with, zero=1)
    path, _ = resumed.load_checkpoint(folder)
    assert path is not None
    torch.manual_seed(5)
    return expected, models.train(resumed, data[3:]), names == sorted(resumed.module.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_resuming_continues_exactly(kind, tmp_path):
    for expected, losses, same_names in run_ranks(2, _resume, kind, str(tmp_path), MXFP4, MXFP4):
        assert losses == expected and same_names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved, loaded", ((None, MXFP4), (MXFP4, None)), ids=("stock-to-mxfp4", "mxfp4-to-stock"))
def test_checkpoints_load_with_and_without_ds_fp4(kind, saved, loaded, tmp_path):
    for expected, losses, same_names in run_ranks(2, _resume, kind, str(tmp_path), saved, loaded):
        torch.testing.assert_close(losses, expected, rtol=0.05, atol=0)
        assert same_names and losses != expected


def _eval_and_accumulation(kind: str) -> tuple[float, float, float, float]:
    import ds_fp4  # noqa: F401

    rank = torch.distributed.get_rank()
    tokens = models.batches(1, rank)[0]
    engine = _engine(kind, MXFP4, dtype="fp32")
    with_grad = models.loss_of(engine, tokens).item()
    with torch.no_grad():
        no_grad = models.loss_of(engine, tokens).item()
    engine.eval()
    with torch.inference_mode():
        inference = models.loss_of(engine, tokens).item()
    engine.train()
    return with_grad, no_grad, inference, models.train(engine, [tokens])[0]


@pytest.mark.parametrize("kind", KINDS)
def test_eval_no_grad_and_inference_mode_use_the_codec_too(kind):
    for with_grad, no_grad, inference, training in run_ranks(2, _eval_and_accumulation, kind):
        assert with_grad == no_grad == training
        if kind == "autoep":  # the classic layer has another capacity in eval
            assert inference == with_grad
        assert abs(inference - with_grad) < 0.2


def _accumulate(kind: str) -> float:
    """Largest relative difference between accumulated gradients and the sum of the micro-batches' gradients."""
    import ds_fp4  # noqa: F401

    model = _engine(kind, MXFP4, dtype="fp32").module
    data = models.batches(4, torch.distributed.get_rank())

    def gradients(batches: list[torch.Tensor]) -> list[torch.Tensor]:
        model.zero_grad()
        for tokens in batches:
            torch.manual_seed(int(tokens.sum()))  # the classic layer's gate samples
            loss = model(tokens) if kind == "classic" else model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    total = [sum(parts) for parts in zip(*(gradients([tokens]) for tokens in data), strict=True)]
    return max(((a - b).norm() / (b.norm() + 1e-12)).item() for a, b in zip(gradients(data), total, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_accumulated_gradients_are_the_sum(kind):
    assert max(run_ranks(2, _accumulate, kind)) < 1e-5


def _overrides(layers: dict) -> tuple[list[str], dict]:
    import ds_fp4  # noqa: F401
    from ds_fp4.integrations.seam import CodecLayer

    engine = models.build(
        models.mixtral(num_hidden_layers=3), models.ds_config({**MXFP4, "layers": layers}, ep_size=2)
    )
    models.train(engine, models.batches(1, torch.distributed.get_rank()))
    legs = {
        module.ds_fp4_name: [
            codec.name if codec else "bf16" for leg in module.ds_fp4_legs for codec in (leg.forward, leg.backward)
        ]
        for module in engine.module.modules()
        if isinstance(module, CodecLayer)
    }
    return _swapped(engine), legs


def test_layer_overrides():
    layers = {"model.layers.0.*": "bf16", "*.2.mlp": {"all_to_all": {"combine_forward": "mxfp4"}}}
    for swapped, legs in run_ranks(2, _overrides, layers):
        assert swapped == ["model.layers.1.mlp", "model.layers.2.mlp"]
        # dispatch forward, dispatch backward, combine forward, combine backward
        assert legs["model.layers.1.mlp"] == ["mxfp4", "fp8", "fp8", "fp8"]
        assert legs["model.layers.2.mlp"] == ["mxfp4", "fp8", "mxfp4", "fp8"]


def _same_model_in_two_engines() -> list[list[str]]:
    import ds_fp4  # noqa: F401

    model = models.classic_model()
    first = models.build(model, models.ds_config(MXFP4))
    found = [_swapped(first)]
    first.destroy()
    for block in model.blocks:  # DeepSpeed binds a layer's group once
        block.moe.deepspeed_moe.ep_group = block.moe.deepspeed_moe.gate.ep_group = None
    second = models.build(model, models.ds_config(None))
    return [*found, _swapped(second)]


def test_a_later_engine_without_a_block_gets_stock_layers_back():
    for first, second in run_ranks(2, _same_model_in_two_engines):
        assert first == ["blocks.0.moe", "blocks.1.moe"] and second == []


def _compiled(kind: str) -> tuple[list[float], list[float]]:
    import ds_fp4  # noqa: F401

    data = models.batches(3, torch.distributed.get_rank())
    eager = models.train(_engine(kind, MXFP4), data)
    engine = _engine(kind, MXFP4)
    engine.compile(backend="aot_eager")
    return eager, models.train(engine, data)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_models_run_the_layers_eagerly(kind):
    for eager, compiled in run_ranks(2, _compiled, kind):
        torch.testing.assert_close(compiled, eager, rtol=0.02, atol=0)


def _folded() -> tuple[list[float], list[float], list[str]]:
    import ds_fp4  # noqa: F401

    config = dict(zero=1, tensor_parallel={"autotp_size": 2, "preset_model": "mixtral"})
    stock = models.build(models.mixtral(), models.ds_config(None, ep_size=2, **config))
    tokens = models.batches(2, torch.distributed.get_rank() // 2)  # tensor-parallel peers see the same tokens
    reference = models.train(stock, tokens)
    stock.destroy()
    engine = models.build(models.mixtral(), models.ds_config(MXFP4, ep_size=2, **config))
    return reference, models.train(engine, tokens), _swapped(engine)


def test_autoep_folded_with_tensor_parallelism():
    for reference, losses, swapped in run_ranks(4, _folded):
        assert swapped == ["model.layers.0.mlp", "model.layers.1.mlp"]
        assert losses != reference
        torch.testing.assert_close(losses, reference, rtol=0.03, atol=0)


def _initialize_imported_first() -> list[str]:
    from deepspeed import initialize

    import ds_fp4  # noqa: F401

    engine, *_ = initialize(model=models.mixtral(), config=models.ds_config(MXFP4, ep_size=2))
    return _swapped(engine)


def test_deepspeed_may_be_imported_first():
    assert run_ranks(2, _initialize_imported_first) == [["model.layers.0.mlp", "model.layers.1.mlp"]] * 2


# Experts of 64 stay at the codec level.
LEVELS = {"codec": 64, "experts": 128}


def _changed(engine, level: str) -> list[str]:
    """The layers at this level."""
    if level == "codec":
        return _swapped(engine)
    modules = engine.module.named_modules()
    return [name.removesuffix(".experts") for name, module in modules if "ds_fp4_experts" in module.__dict__]


class _Tokens(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, item: int) -> dict:
        tokens = torch.randint(0, models.VOCABULARY, (16,), generator=torch.Generator().manual_seed(item))
        return {"input_ids": tokens, "labels": tokens}


def _trainer(folder: str, level: str) -> tuple[list[str], list[float], list[float]]:
    from transformers import Trainer, TrainingArguments

    import ds_fp4  # noqa: F401

    config = models.ds_config(MXFP4, ep_size=2)
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
        max_steps=4,
        logging_steps=1,
        report_to=[],
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        deepspeed=config,
        save_strategy="no",
        disable_tqdm=True,
        eval_strategy="steps",
        eval_steps=2,
        gradient_checkpointing=level == "experts",
    )
    model = models.mixtral(intermediate_size=LEVELS[level])
    trainer = Trainer(model, arguments, train_dataset=_Tokens(), eval_dataset=_Tokens())
    trainer.train()
    log = trainer.state.log_history
    changed = _changed(trainer.model_wrapped, level)
    return changed, *([entry[key] for entry in log if key in entry] for key in ("loss", "eval_loss"))


@pytest.mark.parametrize("level", LEVELS)
def test_hugging_face_trainer(level, tmp_path):
    for changed, losses, held_out in run_ranks(2, _trainer, str(tmp_path), level):
        assert changed == ["model.layers.0.mlp", "model.layers.1.mlp"]
        assert len(losses) == 4 and all(0 < loss < 10 for loss in losses)
        assert len(held_out) == 2 and held_out[1] < held_out[0]


def _accelerate(level: str) -> tuple[list[str], list[float]]:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    import ds_fp4  # noqa: F401

    plugin = DeepSpeedPlugin(hf_ds_config=models.ds_config(MXFP4, ep_size=2))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    loader = torch.utils.data.DataLoader(_Tokens(), batch_size=2)
    model, loader = accelerator.prepare(models.mixtral(intermediate_size=LEVELS[level]), loader)
    changed, losses, batch = _changed(model, level), [], next(iter(loader))
    for _ in range(6):
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)  # steps the engine
        losses.append(loss.item())
    return changed, losses


@pytest.mark.parametrize("level", LEVELS)
def test_accelerate(level):
    for changed, losses in run_ranks(2, _accelerate, level, joins=False):
        assert changed == ["model.layers.0.mlp", "model.layers.1.mlp"]
        assert losses[-1] < 0.9 * losses[0]


SCRIPT = """
    import argparse, json, sys
    import deepspeed
    import torch
    from tests.distributed import models

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    assert __name__ == "__main__"
    deepspeed.init_distributed()
    engine = models.build(models.classic_model(), models.ds_config({"enabled": True, "recipe": "mxfp4"}))
    models.train(engine, models.batches(1, torch.distributed.get_rank()))
    names = [type(block.moe.deepspeed_moe).__name__ for block in engine.module.blocks]
    with open(f"{arguments.out}.{torch.distributed.get_rank()}", "w") as file:
        json.dump(names, file)
"""


@pytest.mark.parametrize("launcher", ("deepspeed", "torchrun"))
def test_ds_fp4_run_starts_an_unmodified_script(launcher, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    out = tmp_path / "names"
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "PYTHONPATH": root, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "ds_fp4.cli.main"]
    if launcher == "deepspeed":
        command = [
            *program,
            "run",
            "--num_gpus",
            "2",
            "--master_port",
            str(free_port()),
            str(script),
            "--out",
            str(out),
        ]
    else:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port()),
            "-m",
            "ds_fp4.cli.main",
            "run",
            str(script),
            "--out",
            str(out),
        ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"names.{rank}").read_text()) == ["Fp4MOELayer"] * 2


def _summary() -> str:
    import ds_fp4.engine as hook
    from ds_fp4.startup import Announcement
    from ds_fp4.summary import summary_lines

    engine = models.build(models.mixtral(num_hidden_layers=3), models.ds_config(ep_size=2))
    block = {**MXFP4, "layers": {"model.layers.1.mlp": "bf16"}}
    plan = hook.make_plan({"ds_fp4": block}, engine.module, torch.device("cpu"), Announcement("test"))
    return "\n".join(summary_lines(plan))


def test_summary_says_layers_codecs_and_bytes():
    text = run_ranks(2, _summary)[0]
    assert "in 2 of 3 MoE layers, recipe mxfp4" in text
    assert "model.layers.{0,2}.mlp: AutoEP, hidden 128, expert-parallel size 2" in text
    # 64 bytes of codes and 4 scales, padded to 16
    assert "forward: dispatch_forward mxfp4 80 + combine_forward fp8 144 = 224 bytes per routed token, 0.44x" in text
    assert "backward: combine_backward fp8 144 + dispatch_backward fp8 144" in text
    assert "as DeepSpeed does it: model.layers.1.mlp" in text
