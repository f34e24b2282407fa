# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Speed and memory of training with each recipe, in one run: DeepSpeed's BF16 experts, FP8, MXFP4.

    deepspeed --num_gpus 2 launch/bench_training.py
    deepspeed --num_gpus 2 launch/bench_training.py --recipes bf16 mxfp4 mxfp4:saved_activations=mxfp4
    deepspeed --num_gpus 2 launch/bench_training.py --autoep gate_up_impl=fused combine_impl=fused_weighted_sum
    deepspeed --num_gpus 2 launch/bench_training.py --loss chunked

The default shape is 4 MoE layers of DeepSeek-V3's with 32 experts, expert-parallel over all ranks. One engine trains
with one recipe after the other on the same batches, and with BF16 once more at the end, which shows how much the
machine drifts. `--loss` is for all recipes alike. Columns, of the rank where they are worst:

- tokens/s: per rank, of the median optimizer step (forward and backward of every micro-batch, and the step);
- above model state: the allocator's peak over whole steps less what parameters, gradients and optimizer hold between
  steps without ds_fp4. FP8 copies of the weights count.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # launchers start this file by its path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ds_fp4 import engine as ds_fp4_engine
from ds_fp4.bench import arguments, profiling
from ds_fp4.config import BLOCK, parse_block
from ds_fp4.integrations import expert_level
from ds_fp4.integrations.seam import restore_class
from ds_fp4.startup import Announcement
from ds_fp4.summary import log_summary
from ds_fp4.version import __version__
from launch.engine import find_json, start_distributed
from launch.model import load_config

SHAPE = ["num_hidden_layers=4", "first_k_dense_replace=0", "n_routed_experts=32"]
CHUNK = 2048  # tokens


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deepseek-v3", help="a config.json, or a name in configs/models")
    parser.add_argument("--model-args", nargs="*", help=f"KEY=VALUE for the config (deepseek-v3: {' '.join(SHAPE)})")
    parser.add_argument(
        "--recipes",
        nargs="+",
        type=_checked(lambda text: parse_block(block_of(text))),
        default=["bf16", "fp8", "mxfp4", "bf16"],
        metavar="RECIPE",
        help="bf16, fp8 or mxfp4, with keys of `experts` after a colon: mxfp4:recompute=fc1,weight_cache=step",
    )
    parser.add_argument(
        "--autoep",
        nargs="*",
        type=_checked(_key_and_value),
        default=[],
        metavar="KEY=VALUE",
        help="keys of the expert_parallel block, for DeepSpeed's faster ways (default: its own defaults)",
    )
    parser.add_argument(
        "--loss",
        choices=("whole", "chunked"),
        default="whole",
        help="whole: the model's own, FP32 logits of all tokens at once; chunked: the head and its cross-entropy over "
        f"{CHUNK} tokens at a time, recomputed in backward, as trainers of large vocabularies do",
    )
    parser.add_argument("--seq-len", type=arguments.count, default=4096)
    parser.add_argument("--micro-batch-size", type=arguments.count, default=4)
    parser.add_argument("--accumulation", type=arguments.count, default=4, help="micro-batches of an optimizer step")
    parser.add_argument("--zero", type=int, choices=range(4), default=1, help="ZeRO stage")
    parser.add_argument("--steps", type=arguments.count, default=4, help="timed optimizer steps of each recipe")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument(
        "--profile",
        action="store_true",
        help="kernels of the expert layers in one micro-batch, and when the GPU was idle",
    )
    parser.add_argument("--output", type=arguments.output_file, help="a JSON file for all numbers")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.model_args is None:
        args.model_args = SHAPE if args.model == "deepseek-v3" else []
    if args.profile and not torch.cuda.is_available():
        parser.error("--profile needs a GPU; torch sees none here")
    return args


def _checked(parse: Callable[[str], object]) -> Callable[[str], str]:
    """For argparse: text that `parse` takes, as it is."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return check


def block_of(recipe: str) -> dict:
    """The `ds_fp4` block of "RECIPE" or "RECIPE:KEY=VALUE,...".

    Raises ValueError where an "=" is missing.
    """
    name, _, changes = recipe.partition(":")
    experts = dict(_key_and_value(change) for change in changes.split(",") if change)
    return {"enabled": True, "recipe": name, "experts": experts}


def keys_of(settings: list[str]) -> dict:
    """{KEY: VALUE} of ["KEY=VALUE", ...]; values as in JSON, text without quotes.

    Raises ValueError where an "=" is missing.
    """
    keys = {}
    for key, value in map(_key_and_value, settings):
        try:
            keys[key] = json.loads(value)
        except json.JSONDecodeError:
            keys[key] = value
    return keys


def _key_and_value(setting: str) -> tuple[str, str]:
    key, found, value = setting.partition("=")
    if not found:
        raise ValueError(f"expected KEY=VALUE, got {setting!r}")
    return key, value


def build_engine(args: argparse.Namespace, device: torch.device) -> deepspeed.DeepSpeedEngine:
    """The model on `device`, random weights, plain SGD: more optimizer state would only hide what is compared."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            load_config(find_json(args.model, "models"), args.model_args), dtype=torch.bfloat16
        )
    model.config.use_cache = False
    if args.loss == "chunked":
        if getattr(model.config, "output_router_logits", False):
            raise ValueError(
                "--loss chunked leaves out the router's loss; add output_router_logits=false to --model-args"
            )
        model.forward = functools.partial(chunked_loss, model)
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "bf16": {"enabled": device.type == "cuda"},
        "zero_optimization": {"stage": args.zero},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-5}},
        "expert_parallel": {"enabled": True, "autoep_size": dist.get_world_size(), **keys_of(args.autoep)},
        BLOCK: {"enabled": True, "recipe": "bf16"},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return engine


def chunked_loss(model: torch.nn.Module, input_ids: torch.Tensor, labels: torch.Tensor, **options) -> object:
    """What a Hugging Face causal model's forward returns, as to its loss of next tokens, targets of -100 left out.

    No more than `CHUNK` tokens' logits exist at a time.
    """
    from transformers.modeling_outputs import CausalLMOutput

    def sum_of(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.get_output_embeddings()(hidden).float(), targets, reduction="sum")

    hidden = model.base_model(input_ids=input_ids, **options).last_hidden_state[:, :-1].flatten(0, 1)
    targets = labels[:, 1:].flatten()
    parts = [
        checkpoint(sum_of, *chunk, use_reentrant=False)
        for chunk in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    return CausalLMOutput(loss=torch.stack(parts).sum() / (targets != -100).sum())


def choose(engine: deepspeed.DeepSpeedEngine, recipe: str) -> None:
    """Make `engine` train with `recipe` from now on."""
    for layer in ds_fp4_engine.find_layers(engine.module):
        expert_level.restore(layer.module)
        restore_class(layer.module)
    config = {BLOCK: block_of(recipe)}
    plan = ds_fp4_engine.make_plan(config, engine.module, engine.device, Announcement(version=__version__))
    ds_fp4_engine.apply(plan, engine.module)
    log_summary(plan)


def step(engine: deepspeed.DeepSpeedEngine, batches: list[torch.Tensor]) -> float:
    """One optimizer step; seconds."""
    _synchronize(engine.device)
    start = time.perf_counter()
    for tokens in batches:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
    _synchronize(engine.device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device, peak: bool) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def measure(
    engine: deepspeed.DeepSpeedEngine, batches: list[torch.Tensor], recipe: str, state: int, args: argparse.Namespace
) -> dict:
    device = engine.device
    choose(engine, recipe)
    for _ in range(args.warmup):
        step(engine, batches)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    dist.barrier()
    seconds = statistics.median(step(engine, batches) for _ in range(args.steps))
    mine = (sum(tokens.numel() for tokens in batches) / seconds, _memory(device, peak=True) - state)
    ranks: list[tuple] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if args.profile and find_experts(engine):
        for direction, stretch in profile_experts(engine, batches[0]).items():
            if dist.get_rank() == 0:
                print(f"{recipe}, expert layers, {direction}:", *stretch.lines(), sep="\n    ", flush=True)
    return {
        "recipe": recipe,
        "tokens_per_second": min(rank[0] for rank in ranks),
        "above_model_state": max(rank[1] for rank in ranks),
    }


def find_experts(engine: deepspeed.DeepSpeedEngine) -> list[torch.nn.Module]:
    """The modules whose experts ds_fp4 computes."""
    return [module for module in engine.module.modules() if isinstance(module, expert_level.ExpertLevelExperts)]


def profile_experts(engine: deepspeed.DeepSpeedEngine, tokens: torch.Tensor) -> dict[str, profiling.Stretch]:
    """What the GPU does in the expert layers of one micro-batch, forward and backward."""
    experts = find_experts(engine)
    handles = []
    for module in experts:
        # Forward's markers around the module; backward's where its output's gradient arrives and its inputs' is ready.
        handles.append(module.register_forward_pre_hook(lambda *_: profiling.mark()))
        handles.append(module.register_forward_hook(lambda *_: profiling.mark()))
        handles.append(module.register_full_backward_pre_hook(lambda *_: profiling.mark()))
        handles.append(module.register_full_backward_hook(lambda *_: profiling.mark()))

    def run() -> None:
        for _ in range(2):  # the profiler's own start falls into the first
            engine.backward(engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
            engine.step()

    try:
        found = profiling.profile(run)[2 * len(experts) :]
    finally:
        for handle in handles:
            handle.remove()
    forward, backward = found[: len(experts)], found[len(experts) :]
    return {"forward": profiling.together(forward), "backward": profiling.together(backward)}


def table(rows: list[dict]) -> str:
    """Markdown, each number beside its ratio to the first recipe's."""
    first = rows[0]
    lines = ["| recipe | tokens/s per rank | above model state |", "| --- | --- | --- |"]
    for row in rows:
        speed = row["tokens_per_second"]
        cells = [row["recipe"], f"{speed:,.0f} ({speed / first['tokens_per_second']:.2f}x)"]
        memory = row["above_model_state"]
        cells.append(f"{memory / 2**30:.2f} GiB ({memory / first['above_model_state']:.2f}x)" if memory > 0 else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    args = parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = start_distributed()
    engine = build_engine(args, device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (args.micro_batch_size, args.seq_len)
    batches = [
        torch.randint(0, engine.module.config.vocab_size, shape, generator=generator).to(device)
        for _ in range(args.accumulation)
    ]
    step(engine, batches)  # gradients and optimizer state come into being
    state = _memory(device, peak=False)
    rows = []
    for recipe in args.recipes:
        rows.append(measure(engine, batches, recipe, state, args))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
    if dist.get_rank() == 0:
        print(
            f"\n{args.model} {' '.join(args.model_args)}, {dist.get_world_size()} x {device.type}, micro-batch "
            f"{args.micro_batch_size} x {args.seq_len}, accumulation {args.accumulation}, ZeRO-{args.zero}, AutoEP "
            f"{' '.join(args.autoep) or 'as by default'}, loss {args.loss}; "
            f"model state {state / 2**30:.1f} GiB\n\n{table(rows)}",
            flush=True,
        )
        if args.output:
            given = {k: str(v) for k, v in vars(args).items()}
            arguments.write_json(args.output, {"arguments": given, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
