# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""A comparison of launch/pretrain.py, its runs shared by several jobs at a time on one machine.

    python launch/jobs.py --jobs 4 --processes 1 --compare bf16 fp8 mxfp4 --seeds 0 1 2 --output runs/judged
    python launch/jobs.py --jobs 4 --processes 2 --compare bf16 runs/a.json runs/b.json --seeds 0 1 2 --keep

All options but these three are launch/pretrain.py's. Each job is that script under torchrun with a port and a log of
its own; it takes the next run that no other job has taken until none is left. Losses are those of one job that does
them all: a run depends on its entry, its seed and the number of processes alone. GPUs are dealt out in groups of
--processes, and jobs share a group where there are more jobs than groups.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from launch.compare import Results, labels_of, read_run, report, run_names, setup_of
from launch.pretrain import parse_args as parse_pretrain_args

SCRIPT = Path(__file__).with_name("pretrain.py")
LOG_EXCERPT = 4000  # characters of a failed job's log that are shown
GRACE_S = 30.0  # for a job that was told to stop


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, argparse.Namespace, list[str]]:
    """This script's options, launch/pretrain.py's, and the words of the latter."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="All other options are launch/pretrain.py's; --compare is required.",
        allow_abbrev=False,
    )
    parser.add_argument("--jobs", type=int, required=True, help="how many run at a time")
    parser.add_argument("--processes", type=int, default=2, help="of each job (default: %(default)s)")
    parser.add_argument(
        "--keep", action="store_true", help="keep the runs in --output that were finished with the same options"
    )
    args, words = parser.parse_known_args(argv)
    training = parse_pretrain_args(words)
    if not training.compare:
        parser.error("--compare is missing: jobs share the runs of a comparison.")
    for name in ("jobs", "processes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}.")
    return args, training, words


def gpu_groups(processes: int) -> list[str | None]:
    """Values of CUDA_VISIBLE_DEVICES for jobs of `processes`; [None] where there are no GPUs."""
    gpus = torch.cuda.device_count()
    if not gpus or os.environ.get("DS_ACCELERATOR") == "cpu":
        return [None]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(gpus)] if visible is None else visible.split(",")[:gpus]
    if processes > gpus:
        raise ValueError(f"--processes {processes}: there are {gpus} GPUs, and each process needs one.")
    return [",".join(names[i : i + processes]) for i in range(0, gpus - processes + 1, processes)]


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def start(words: list[str], processes: int, gpus: str | None, port: int, share: str, log: Path) -> subprocess.Popen:
    """One job in a session of its own, so that it can be stopped with all its processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(port), str(SCRIPT), *words, "--share", share]
    environment = {**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})}
    with open(log, "w") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
        )


def stop(jobs: list[subprocess.Popen]) -> None:
    """Ends the jobs that still run. torchrun ends its processes when it is told to stop."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        alive = [job for job in jobs if job.poll() is None]
        for job in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, sign)
        deadline = time.monotonic() + GRACE_S
        for job in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(max(0.0, deadline - time.monotonic()))


def wait(jobs: list[subprocess.Popen], logs: list[Path], output: Path, names: list[str]) -> None:
    """Until all jobs have ended; says which runs have finished. RuntimeError as soon as a job fails."""
    started, missing = time.monotonic(), list(names)
    running = True
    while running:
        running = any(job.poll() is None for job in jobs)
        for name in list(missing):
            run = read_run(output, name)
            if run is None:
                continue
            missing.remove(name)
            print(
                f"{name}: held-out loss {run.summary.held_out_loss:.4f} ({len(names) - len(missing)} of {len(names)}, "
                f"{time.monotonic() - started:.0f} s)",
                flush=True,
            )
        for job, log in zip(jobs, logs, strict=True):
            if job.poll():
                text = log.read_text(errors="replace")
                # What torchrun says at the end is about processes that it stopped: the first error is the cause.
                cause = text.find("Traceback (most recent call last)")
                excerpt = text[-LOG_EXCERPT:] if cause < 0 else text[cause:][:LOG_EXCERPT]
                raise RuntimeError(
                    f"{log.stem} ended with exit code {job.returncode}; the others were stopped. From {log}:\n\n"
                    f"{excerpt}"
                )
        if running:
            time.sleep(0.5)
    if missing:
        raise RuntimeError(f"No job failed, but these runs have no result: {', '.join(missing)}. See {logs[0]}.")


def main(argv: list[str] | None = None) -> None:
    args, training, words = parse_args(argv)
    output, seeds = training.output, training.seeds or [training.seed]
    output.mkdir(parents=True, exist_ok=True)
    labels = labels_of(training.compare)
    names = run_names(labels, seeds)
    todo = []
    for (label, _), name in names.items():
        run = read_run(output, name) if args.keep else None
        entry = training.compare[labels.index(label)]
        if run is None or run.setup != setup_of(training, entry) or run.processes != args.processes:
            (output / f"{name}.summary.json").unlink(missing_ok=True)
            todo.append(name)
    count = min(args.jobs, len(todo))
    groups, ports = gpu_groups(args.processes), free_ports(count)
    logs = [output / f"job{i}.log" for i in range(count)]
    print(
        f"{len(todo)} of {len(names)} runs to do, {count} jobs at a time, {args.processes} processes each", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="claims-", dir=output) as share:
        for name in set(names.values()) - set(todo):
            Path(share, name).touch()
        jobs: list[subprocess.Popen] = []
        try:
            for i in range(count):
                jobs.append(start(words, args.processes, groups[i % len(groups)], ports[i], share, logs[i]))
            wait(jobs, logs, output, todo)
        except RuntimeError as error:
            sys.exit(f"launch/jobs.py: {error}")
        finally:
            stop(jobs)
    results: Results = {label: {} for label in labels}
    for (label, seed), name in names.items():
        results[label][seed] = (run := read_run(output, name)).summary
    notes = [f"Up to {count} jobs ran at a time: tokens/s is what was left to each."] if count > 1 else []
    report(results, output, run.title, notes)


if __name__ == "__main__":
    main()
