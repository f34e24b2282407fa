# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""Runs a function on N gloo ranks (NCCL where asked) and brings their results or tracebacks back.

Each rank is a fresh process, forked from a server that has already imported torch, DeepSpeed and transformers, so a
test pays for a fork and not for seconds of imports. ds_fp4 is deliberately not among them: when it is imported is part
of what is tested.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

_PRELOAD = [
    "torch",
    "deepspeed",
    "deepspeed.moe.layer",
    "deepspeed.module_inject.auto_ep_layer",
    "transformers",
    "transformers.models.mixtral.modeling_mixtral",
    "pytest",
    "torch.utils.cpp_extension",
    "tests.distributed.models",
    "tests.distributed.preloaded",
]


class RankFailure(AssertionError):
    """At least one rank raised or died; `errors` holds each rank's traceback or None."""

    def __init__(self, errors: list[str | None]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- rank {rank}:\n{error}" for rank, error in enumerate(errors) if error))


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def forks() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have imported what takes long, and cannot use a GPU."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def device_for(world_size: int) -> str:
    """ "cuda" (and so NCCL) where every rank gets a GPU of its own, else "cpu" (gloo)."""
    import torch

    return "cuda" if torch.cuda.device_count() >= world_size else "cpu"


def _use_device(device: str, rank: int) -> None:
    # DeepSpeed was imported, and had picked its accelerator, in the fork server.
    import torch
    from deepspeed.accelerator import set_accelerator

    if device == "cuda":
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        set_accelerator(CUDA_Accelerator())
        torch.cuda.set_device(rank)
    else:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())


def _rank_main(
    rank: int,
    world_size: int,
    device: str,
    port: int,
    folder: str,
    env: dict[str, str],
    function: Callable,
    args: tuple,
    joins: bool,
) -> None:
    # No LOCAL_SIZE: with it DeepSpeed's CPU backend maps 66 MiB of shared memory a rank, and leaves it behind.
    os.environ.update(
        DS_ACCELERATOR=device,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **env,
    )
    import torch

    torch.set_num_threads(1)
    _use_device(device, rank)
    try:
        if joins:
            import deepspeed

            deepspeed.init_distributed(verbose=False)
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    with open(os.path.join(folder, f"{rank}.tmp"), "wb") as file:
        pickle.dump(outcome, file)
    os.replace(os.path.join(folder, f"{rank}.tmp"), os.path.join(folder, f"{rank}"))
    # A failed rank leaves its peers in whatever they were doing; skip the destructors that would wait for them.
    os._exit(0 if outcome[0] else 1)


def run_ranks(
    world_size: int,
    function: Callable,
    *args: Any,
    timeout: float = 180.0,
    env: dict[str, str] | None = None,
    joins: bool = True,
    on_cpu: bool = False,
    patience: float = 15.0,
) -> list[Any]:
    """Call `function(*args)` on every rank and return what each returned, by rank.

    Args:
        world_size: number of processes.
        function: module-level function; results must be picklable (no tensors that require grad).
        timeout: seconds for all ranks together.
        env: extra environment variables.
        joins: whether to call `deepspeed.init_distributed` first.
        on_cpu: that no rank is to see a GPU, where there are any.
        patience: seconds that the others get when one has failed.

    Raises RankFailure with every rank's traceback if any rank raised, died or did not finish.
    """
    device = "cpu" if on_cpu else device_for(world_size)
    # Too few of them as well: torch and DeepSpeed would use those there are, whatever device ranks were given.
    hides_gpus = device == "cpu" and device_for(1) == "cuda"
    # DeepSpeed's import asks the driver for its GPUs, and a process forked after that cannot use them.
    context = multiprocessing.get_context("spawn") if device == "cuda" or hides_gpus else forks()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        processes = [
            context.Process(
                target=_rank_main, args=(rank, world_size, device, port, folder, env or {}, function, args, joins)
            )
            for rank in range(world_size)
        ]
        with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if hides_gpus else {}):
            for process in processes:
                process.start()
        started = time.monotonic()
        deadline = started + timeout
        while (alive := [p.sentinel for p in processes if p.is_alive()]) and time.monotonic() < deadline:
            multiprocessing.connection.wait(alive, max(0.0, deadline - time.monotonic()))
            if any(process.exitcode for process in processes):
                # What the others do now is wait for it, some of them as long as gloo does.
                deadline = min(deadline, time.monotonic() + patience)
        results, errors = [], []
        for rank, process in enumerate(processes):
            alive = process.is_alive()
            if alive:
                process.kill()
                process.join()
            path = os.path.join(folder, str(rank))
            if os.path.exists(path):
                with open(path, "rb") as file:
                    succeeded, value = pickle.load(file)
            else:
                succeeded = False
                value = (
                    f"was still running after {time.monotonic() - started:.0f} s"
                    if alive
                    else f"died with exit code {process.exitcode}"
                )
            results.append(value if succeeded else None)
            errors.append(None if succeeded else value)
    if any(error is not None for error in errors):
        raise RankFailure(errors)
    return results
