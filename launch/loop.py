# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The training loop: steps, held-out evaluation, checkpoints."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from ds_fp4.traffic import DIRECTIONS, AllToAllTraffic
from launch.data import Corpus, TrainingBatches, held_out_rows
from launch.engine import build_engine
from launch.metrics import (
    MetricsFile,
    PeakMemory,
    Summary,
    max_over_ranks,
    sum_over_ranks,
    summarize,
    truncate_metrics,
)
from launch.model import forward_losses


def train(args: argparse.Namespace, corpus: Corpus, device: torch.device, recipe: str, seed: int) -> Summary | None:
    """Trains one model; rank 0 writes `<output>/<recipe>-seed<seed>.jsonl` and returns its summary."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = PeakMemory(device)
    memory.reset()
    engine = build_engine(args, recipe, seed)
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    batches = TrainingBatches(corpus.train, args.seq_len, engine.train_batch_size(), seed)
    held_out = held_out_rows(corpus.held_out, args.seq_len, args.eval_tokens)

    name = f"{Path(recipe).stem}-seed{seed}"
    checkpoints, metrics_path = args.output / f"{name}.checkpoints", args.output / f"{name}.jsonl"
    data_state = {
        "digest": corpus.digest,
        "seed": seed,
        "batch_size": engine.train_batch_size(),
        "seq_len": args.seq_len,
    }
    if args.init_from:
        initialize_from(engine, args.init_from)
    step = resume(engine, checkpoints, data_state, args.steps) if args.resume else 0
    if rank == 0:
        truncate_metrics(metrics_path, step if args.resume else -1)
    metrics = MetricsFile(metrics_path if rank == 0 else None)

    interval = 0.5 if sys.stderr.isatty() else 15.0
    bar = tqdm(total=args.steps, initial=step, desc=name, unit="step", mininterval=interval, disable=rank != 0)
    while step < args.steps:
        start, lr = time.perf_counter(), engine.get_lr()[0]
        torch.manual_seed(seed * 1_000_003 + step)  # a resumed run draws what an unbroken one would
        loss_sum = 0.0
        with AllToAllTraffic() as traffic:
            for i in range(accumulation):
                rows = batches.rows(step, first=(i * world + rank) * micro, count=micro).to(device)
                loss, objective = forward_losses(engine, rows)
                engine.backward(objective)
                engine.step()
                loss_sum += loss.item() / accumulation
        loss, *sent = sum_over_ranks([loss_sum, *(getattr(traffic, d).payload.sent for d in DIRECTIONS)], device)
        speed = engine.train_batch_size() * args.seq_len / (time.perf_counter() - start)
        step += 1
        norm = engine.get_global_grad_norm()  # None without ZeRO and clipping
        metrics.write(
            step=step,
            loss=loss / world,
            grad_norm=None if norm is None else float(norm),
            lr=lr,
            tokens_per_second=speed,
            **{f"{direction}_bytes": value for direction, value in zip(DIRECTIONS, sent, strict=True)},
        )
        bar.set_postfix_str(f"loss {loss / world:.4f}, {speed:,.0f} tokens/s", refresh=False)
        bar.update()
        if step == args.steps or (args.eval_every and step % args.eval_every == 0):
            held_out_loss = evaluate(engine, held_out, device)
            metrics.write(step=step, held_out_loss=held_out_loss)
            if rank == 0:
                bar.write(f"{name}: step {step}, held-out loss {held_out_loss:.4f}")
        if args.save_every and step % args.save_every == 0:
            engine.save_checkpoint(
                str(checkpoints), tag=f"step{step}", client_state={"step": step, "data": data_state}
            )
    bar.close()
    metrics.close()

    peak = int(max_over_ranks(memory.read(), device))
    engine.destroy()
    engine = objective = None  # so that a next engine starts with this one's memory free
    gc.collect()
    return summarize(metrics_path, peak, memory.name) if rank == 0 else None


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, rows: torch.Tensor, device: torch.device) -> float:
    """Mean loss over the held-out rows, int64 [N, S + 1], each counted once.

    All ranks run equally many forwards of equally many rows: their experts serve each other, and the classic layer's
    all-to-all needs equal capacities. Rows that only fill up the last batch get no weight.
    """
    engine.eval()
    micro, world, rank = engine.train_micro_batch_size_per_gpu(), dist.get_world_size(), dist.get_rank()
    total = 0.0
    for start in range(rank * micro, len(rows) + rank * micro, micro * world):
        numbers = torch.arange(start, start + micro)
        batch = rows[numbers % len(rows)].to(device)
        logits = engine(input_ids=batch[:, :-1], use_cache=False).logits
        losses = F.cross_entropy(logits.float().transpose(1, 2), batch[:, 1:], reduction="none").mean(dim=1)
        total += losses[: int((numbers < len(rows)).sum())].sum().item()
    engine.train()
    return sum_over_ranks([total], device)[0] / len(rows)


def initialize_from(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Takes the weights, and nothing else, of the last checkpoint in `folder`."""
    path, _ = engine.load_checkpoint(str(folder), load_module_only=True)
    if path is None:
        raise RuntimeError(
            f"--init-from {folder}: no checkpoint there. Name a <recipe>-seed<seed>.checkpoints folder that "
            "--save-every made with the same --model, --moe and --ep-size."
        )


def resume(engine: deepspeed.DeepSpeedEngine, checkpoints: Path, data_state: dict, last_step: int) -> int:
    """Loads the last checkpoint and returns its step; refuses one that this run would not go on from."""
    path, state = engine.load_checkpoint(str(checkpoints))
    if path is None:
        raise RuntimeError(
            f"--resume: no checkpoint in {checkpoints}. Run with --save-every first, or name the --output it used."
        )
    changed = [
        f"{key}: {state['data'].get(key)} then, {value} now"
        for key, value in data_state.items()
        if state["data"].get(key) != value
    ]
    if changed:
        raise ValueError(f"--resume from {path}: the data would not continue where it stopped ({'; '.join(changed)}).")
    if state["step"] > last_step:
        raise ValueError(f"--resume from {path}: it is at step {state['step']}, past --steps {last_step}.")
    return state["step"]
