# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""A comparison of launch/pretrain.py, its runs shared by several jobs at a time on one machine.

    python launch/jobs.py --jobs 4 --processes 1 --compare bf16 fp8 mxfp4 --seeds 0 1 2 --output runs/judged
    python launch/jobs.py --jobs 4 --processes 2 --compare bf16 runs/a.json runs/b.json --seeds 0 1 2 --keep

All options but these three are launch/pretrain.py's. Each job is that script under torchrun with a port and a log of
its own; it takes the next run that no other job has taken until none is left. Losses are those of one job that does
them all: a run depends on its entry, its seed and the number of processes alone. GPUs are dealt out in groups of
--processes, and jobs share a group where there are more jobs than groups. A job that fails stops the others, unless
--keep-going is given: then another takes its place, and the table has what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
    parser.add_argument(
        "--keep-going", action="store_true", help="a failed run does not stop the others; it is named at the end"
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


def _die_with_parent() -> None:
    # Linux: SIGTERM to this process when the one that started it is gone, killed outright included.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def start(words: list[str], processes: int, gpus: str | None, port: int, share: str, log: Path) -> subprocess.Popen:
    """One job in a session of its own, so that it can be stopped with all its processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(port), str(SCRIPT), *words, "--share", share]
    environment = {**os.environ, **({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})}
    with open(log, "w") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
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


def excerpt(log: Path) -> str:
    """What a failed job's log says about the cause."""
    text = log.read_text(errors="replace")
    # What torchrun says at the end is about processes that it stopped: the first error is the cause.
    cause = text.find("Traceback (most recent call last)")
    return text[-LOG_EXCERPT:] if cause < 0 else text[cause:][:LOG_EXCERPT]


def wait(
    jobs: list[subprocess.Popen],
    logs: list[Path],
    output: Path,
    names: list[str],
    replace: Callable[[int], subprocess.Popen | None] | None = None,
) -> list[str]:
    """Until all jobs have ended; says which runs have finished.

    Args:
        replace: called with the number of a job that failed, returns one in its place if there is more to do. None
            raises RuntimeError instead.

    Returns:
        The runs without a result, if `replace` is given; else these are a RuntimeError as well.
    """
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
        for number, (job, log) in enumerate(zip(jobs, logs, strict=True)):
            if not job.poll():
                continue
            ended = f"{log.stem} ended with exit code {job.returncode}"
            if replace is None:
                raise RuntimeError(f"{ended}; the others were stopped. From {log}:\n\n{excerpt(log)}")
            if not getattr(job, "reported", False):
                job.reported = True
                print(f"{ended}. From {log}:\n\n{excerpt(log)}\n", flush=True)
                instead = replace(number)
                if instead is not None:
                    jobs[number], running = instead, True
        if running:
            time.sleep(0.5)
    if missing and replace is None:
        raise RuntimeError(f"No job failed, but these runs have no result: {', '.join(missing)}. See {logs[0]}.")
    return missing


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

        def start_job(i: int, port: int) -> subprocess.Popen:
            return start(words, args.processes, groups[i % len(groups)], port, share, logs[i])

        def replace(i: int) -> subprocess.Popen | None:
            claimed = {path.name for path in Path(share).iterdir()}
            lost = [name for name in todo if name in claimed and read_run(output, name) is None]
            # Each running job may hold one claim. A job that took no run would fail again.
            if len(claimed) >= len(names) or len(lost) - len(given_up) <= sum(job.poll() is None for job in jobs):
                return None
            given_up.append(i)
            logs[i] = output / f"job{i}-{len(given_up)}.log"
            return start_job(i, free_ports(1)[0])

        given_up: list[int] = []
        # Told to stop, it must not leave its jobs on the GPUs.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("launch/jobs.py: told to stop"))
        try:
            for i in range(count):
                jobs.append(start_job(i, ports[i]))
            missing = wait(jobs, logs, output, todo, replace if args.keep_going else None)
        except RuntimeError as error:
            sys.exit(f"launch/jobs.py: {error}")
        finally:
            stop(jobs)
            signal.signal(signal.SIGTERM, before)
    results: Results = {label: {} for label in labels}
    for (label, seed), name in names.items():
        if (found := read_run(output, name)) is not None:
            results[label][seed] = (run := found).summary
    if not any(results.values()):
        sys.exit("launch/jobs.py: no run has a result.")
    notes = [f"Up to {count} jobs ran at a time: tokens/s is what was left to each."] if count > 1 else []
    report(results, output, run.title, notes)
    if missing:
        sys.exit(f"launch/jobs.py: these runs have no result: {', '.join(missing)}")


if __name__ == "__main__":
    main()
