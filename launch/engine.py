# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""From the command line to a DeepSpeed engine: process group, DeepSpeed JSON, model, `deepspeed.initialize`."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist

from launch.model import build_model, choose_ep_size, expert_count, load_config, use_classic_moe

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
LOCAL_SIZE_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def start_distributed() -> torch.device:
    """Joins the process group (NCCL on GPUs, gloo on CPUs) and returns this process's device.

    The deepspeed launcher and torchrun give the ranks in the environment; under mpirun DeepSpeed asks mpi4py. Without
    any launcher this is a job of one process.
    """
    if not any(name in os.environ for name in RANK_VARIABLES):
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    deepspeed.init_distributed(distributed_port=int(os.environ.get("MASTER_PORT", 29500)), verbose=False)
    accelerator, local_rank = get_accelerator(), int(os.environ["LOCAL_RANK"])
    if accelerator.device_name() == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            neighbours = next(
                (int(os.environ[name]) for name in LOCAL_SIZE_VARIABLES if name in os.environ), dist.get_world_size()
            )
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // neighbours))
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank))


def find_json(name: str, folder: str) -> Path:
    """`name` as a path, or as the name of a file in configs/`folder`."""
    shipped = CONFIGS / folder / f"{name}.json"
    for path in (Path(name), shipped):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in shipped.parent.glob("*.json")))
    raise ValueError(f"{name}: neither a file (looked from {os.getcwd()}) nor one of configs/{folder}: {known}.")


def divide_batch(batch: int, largest_micro: int, world_size: int) -> tuple[int, int, int]:
    """Global batch, micro-batch and accumulation steps for `world_size` processes.

    The global batch stays as asked for where it divides evenly; the micro-batch is then the largest one allowed that
    divides a process's share. Else the global batch is rounded up to one that divides, and a warning says so.
    """
    if batch < 1 or largest_micro < 1:
        raise ValueError(
            f"Batch sizes must be at least 1, but --batch-size is {batch}, --micro-batch-size {largest_micro}."
        )
    share, rest = divmod(batch, world_size)
    if not rest:
        micro = next(size for size in range(min(largest_micro, share), 0, -1) if share % size == 0)
        return batch, micro, share // micro
    accumulation = math.ceil(batch / (world_size * largest_micro))
    micro = math.ceil(batch / (world_size * accumulation))
    rounded = micro * accumulation * world_size
    log_dist(
        f"{batch} rows are no multiple of {world_size} processes: each step takes {rounded} rows.",
        ranks=[0],
        level=logging.WARNING,
    )
    return rounded, micro, accumulation


def deepspeed_config(args: argparse.Namespace, recipe: str, experts: int, world_size: int) -> tuple[dict, int]:
    """The recipe's JSON with the command line's choices filled in, and the expert-parallel size."""
    path = find_json(recipe, args.moe)
    config = json.loads(path.read_text())
    ep_size = choose_ep_size(args.ep_size, experts, world_size)
    if args.moe == "autoep":
        if not config.get("expert_parallel", {}).get("enabled"):
            raise ValueError(
                f'{path}: --moe autoep needs "expert_parallel": {{"enabled": true}}. Add it, or use --moe classic.'
            )
        config["expert_parallel"]["autoep_size"] = ep_size
    elif "expert_parallel" in config:
        raise ValueError(f'{path}: --moe classic excludes an "expert_parallel" block. Remove it, or use --moe autoep.')

    batch, micro, accumulation = divide_batch(
        args.batch_size or config["train_batch_size"],
        args.micro_batch_size or config["train_micro_batch_size_per_gpu"],
        world_size,
    )
    config.update(
        train_batch_size=batch, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation
    )

    if args.lr is not None:
        config["optimizer"]["params"]["lr"] = args.lr
    schedule = config.get("scheduler", {}).get("params", {})
    if "total_num_steps" in schedule:
        schedule["total_num_steps"] = args.steps
        schedule["warmup_num_steps"] = max(1, min(schedule.get("warmup_num_steps", args.steps), args.steps // 10))
    return config, ep_size


def build_engine(args: argparse.Namespace, recipe: str, seed: int) -> deepspeed.DeepSpeedEngine:
    """A new model from `seed`, and its engine."""
    model_config = load_config(find_json(args.model, "models"), args.model_args)
    config, ep_size = deepspeed_config(args, recipe, expert_count(model_config), dist.get_world_size())
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32
    model = build_model(model_config, dtype, args.gradient_checkpointing)
    parameters = list(model.parameters())
    if args.moe == "classic":
        parameters = use_classic_moe(model, ep_size, dist.get_rank(), args.capacity_factor)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    return engine
