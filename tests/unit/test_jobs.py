# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""launch/jobs.py: which runs are taken by whom, on which GPUs, and what a failed job is answered with."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ds_fp4.config import ConfigError
from launch import checkpointing_configs, compare, jobs
from tests.distributed.harness import forks
from tests.unit.test_pretrain import write_run as write_metrics

OPTIONS = ["--compare", "bf16", "mxfp4", "--seeds", "0", "1", "--steps", "3"]


def finish(folder: Path, words: list[str], entry: str, seed: int, loss: float = 2.0, processes: int = 2) -> None:
    """As if a job had finished a run."""
    name = f"{entry}-seed{seed}"
    _, training, _ = jobs.parse_args(["--jobs", "1", *words, "--output", str(folder)])
    summary = write_metrics(folder / f"{name}.jsonl", [3.0, 2.5, loss], loss)
    compare.write_run(compare.Run("a title", processes, compare.setup_of(training, entry), summary), folder, name)


def test_a_run_is_claimed_once(tmp_path):
    assert [compare.claim(tmp_path, name) for name in ("a", "b", "a")] == [True, True, False]


def test_a_run_comes_back_as_it_was_written(tmp_path):
    assert compare.read_run(tmp_path, "bf16-seed0") is None
    finish(tmp_path, OPTIONS, "bf16", 0, 2.125)
    run = compare.read_run(tmp_path, "bf16-seed0")
    assert (run.title, run.processes, run.summary.held_out_loss) == ("a title", 2, 2.125)


def test_the_setup_is_what_losses_depend_on():
    def setup(*words: str, entry: str = "bf16") -> dict:
        return compare.setup_of(jobs.parse_args(["--jobs", "1", *OPTIONS, *words])[1], entry)

    assert setup() == setup("--output", "elsewhere") == setup("--seeds", "4", "5")
    assert setup() != setup("--lr", "1e-3") and setup() != setup(entry="mxfp4") and setup() != setup("--data", "x")


def test_gpus_are_dealt_out_in_groups(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert jobs.gpu_groups(2) == ["0,1", "2,3"] and jobs.gpu_groups(1) == list("01234")
    with pytest.raises(ValueError, match="--processes 6: there are 5 GPUs"):
        jobs.gpu_groups(6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,3,5,GPU-8,2")
    assert jobs.gpu_groups(2) == ["7,3", "5,GPU-8"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert jobs.gpu_groups(6) == [None]


def test_ports_differ():
    assert len(set(jobs.free_ports(20))) == 20


@pytest.mark.parametrize(
    "words, message",
    [
        (["--jobs", "2", "--recipe", "bf16"], "--compare is missing"),
        (["--jobs", "0", *OPTIONS], "--jobs must be at least 1, got 0"),
        (["--jobs", "1", "--processes", "0", *OPTIONS], "--processes must be at least 1, got 0"),
        (["--jobs", "1", *OPTIONS, "--resume"], "--compare starts each entry anew"),
        (OPTIONS, "--jobs"),
    ],
)
def test_a_wrong_command_line(words, message, capsys):
    with pytest.raises(SystemExit):
        jobs.parse_args(words)
    assert message in capsys.readouterr().err


def test_finished_runs_are_kept_if_asked_for(tmp_path, capsys, monkeypatch):
    words = [*OPTIONS, "--output", str(tmp_path)]
    for entry, seed in (("bf16", 0), ("mxfp4", 0), ("bf16", 1), ("mxfp4", 1)):
        finish(tmp_path, OPTIONS, entry, seed, 2.0 + seed / 500 + (entry == "mxfp4") / 100)
    jobs.main(["--jobs", "4", *words, "--keep"])
    printed = capsys.readouterr().out
    assert "0 of 4 runs to do" in printed and "+0.50 % (+0.50 to +0.50)" in printed and "a title" in printed
    assert json.loads((tmp_path / "compare.json").read_text())["entries"]["mxfp4"]["1"][
        "held_out_loss"
    ] == pytest.approx(2.012)

    # Other options, or another number of processes: to be done again.
    finish(tmp_path, [*OPTIONS, "--lr", "1"], "bf16", 0)
    finish(tmp_path, OPTIONS, "mxfp4", 1, processes=4)

    def look(*args) -> None:
        assert sorted(path.name for path in Path(args[4]).iterdir()) == ["bf16-seed1", "mxfp4-seed0"]
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "start", look)
    with pytest.raises(KeyboardInterrupt):
        jobs.main(["--jobs", "1", *words, "--keep"])
    assert "2 of 4 runs to do" in capsys.readouterr().out
    assert not (tmp_path / "bf16-seed0.summary.json").exists() and not list(tmp_path.glob("claims-*"))


def test_a_failed_job_stops_the_others_and_says_why(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    # The first to come fails, the other would run for ever.
    script.write_text(
        "import os, sys, time\n"
        "share = sys.argv[sys.argv.index('--share') + 1]\n"
        "try:\n"
        "    os.mkdir(os.path.join(share, 'first'))\n"
        "except FileExistsError:\n"
        "    time.sleep(600)\n"
        "raise ArithmeticError('no good')\n"
    )
    monkeypatch.setattr(jobs, "SCRIPT", script)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    started = []
    real = jobs.start
    monkeypatch.setattr(jobs, "start", lambda *args: started.append(real(*args)) or started[-1])
    with pytest.raises(
        SystemExit, match=r"(?s)job\d ended with exit code 1; the others were stopped.*no good"
    ) as error:
        jobs.main(["--jobs", "2", "--processes", "1", *OPTIONS, "--output", str(tmp_path)])
    assert str(error.value).count("Traceback") >= 1
    assert len(started) == 2 and all(job.poll() is not None for job in started)


def test_checkpointing_configs(tmp_path, capsys):
    checkpointing_configs.main(
        [
            *(str(tmp_path), "--only", "layers-*", "--jobs", "3", "--processes", "1"),
            *("--set", "fc1", "recipe=mxfp4", "experts.recompute=fc1", "--lr", "1e-3"),
        ]
    )
    command = capsys.readouterr().out.split()
    assert command[:6] == ["python", "launch/jobs.py", "--jobs", "3", "--processes", "1"]
    assert command[6] == "--keep-going" and command[-2:] == [
        "--lr",
        "1e-3",
    ]
    assert {path.stem for path in tmp_path.glob("*.json")} == {
        *("layers-mxfp4", "layers-mxfp4-inexact", "layers-fp8", "layers-fp8-inexact", "fc1")
    }
    block = json.loads((tmp_path / "fc1.json").read_text())["ds_fp4"]
    assert block["experts"] == {"recompute": "fc1"} and block["recipe"] == "mxfp4" and block["enabled"]
    layers = json.loads((tmp_path / "layers-fp8.json").read_text())["ds_fp4"]
    assert layers["checkpointing"] == dict(enabled=True, format="fp8", exact=True, scope="layers")
    with pytest.raises(ConfigError, match="ds_fp4.experts.recompute = 'fc2'"):
        checkpointing_configs.main([str(tmp_path), "--set", "x", "experts.recompute=fc2"])
    with pytest.raises(SystemExit):
        checkpointing_configs.main([str(tmp_path), "--set", "bf16", "recipe=fp8"])


# A job, but for the training: a run's files are there already.
SHARED_SCRIPT = """
import os, shutil, sys, time

share, output = (sys.argv[sys.argv.index(word) + 1] for word in ("--share", "--output"))
for name in ("bf16-seed0", "mxfp4-seed0", "bf16-seed1", "mxfp4-seed1"):
    try:
        open(os.path.join(share, name), "x").close()
    except FileExistsError:
        continue
    if name == "mxfp4-seed0":
        raise ArithmeticError("no good")
    time.sleep(1)
    shutil.copytree(os.path.join({ready!r}, name), output, dirs_exist_ok=True)
"""


def test_a_failed_run_does_not_cost_the_others_theirs(tmp_path, monkeypatch, capsys):
    script, ready = tmp_path / "script.py", tmp_path / "ready"
    for entry, seed in (("bf16", 0), ("bf16", 1), ("mxfp4", 1)):
        folder = ready / f"{entry}-seed{seed}"
        folder.mkdir(parents=True)
        finish(folder, OPTIONS, entry, seed, processes=1)
    script.write_text(SHARED_SCRIPT.format(ready=str(ready)))
    monkeypatch.setattr(jobs, "SCRIPT", script)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = ["--jobs", "1", "--processes", "1", "--keep-going", *OPTIONS, "--output", str(tmp_path)]
    with pytest.raises(SystemExit, match="these runs have no result: mxfp4-seed0"):
        jobs.main(words)
    printed = capsys.readouterr().out
    assert "no good" in printed and "3 of 4" in printed
    entries = json.loads((tmp_path / "compare.json").read_text())["entries"]
    assert sorted(entries["bf16"]) == ["0", "1"] and sorted(entries["mxfp4"]) == ["1"]


def test_jobs_that_fail_before_they_take_a_run_are_not_replaced_for_ever(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("raise ArithmeticError('no good')\n")
    monkeypatch.setattr(jobs, "SCRIPT", script)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(SystemExit, match="no run has a result"):
        jobs.main(["--jobs", "1", "--processes", "1", "--keep-going", *OPTIONS, "--output", str(tmp_path)])
    assert len(list(tmp_path.glob("job*.log"))) == 1


def _jobs(script: Path, words: list[str]) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    jobs.SCRIPT = script
    jobs.main(words)


@pytest.mark.parametrize("sign", (signal.SIGTERM, signal.SIGKILL))
def test_no_job_outlives_the_one_that_started_it(tmp_path, sign):
    script, pid = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    words = ["--jobs", "1", "--processes", "1", *OPTIONS, "--output", str(tmp_path)]
    parent = forks().Process(target=_jobs, args=(script, words))
    parent.start()

    def within(seconds: float, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.1)
        return condition()

    assert within(60, lambda: pid.exists() and pid.read_text() != "")
    os.kill(parent.pid, sign)
    parent.join(60)
    assert parent.exitcode not in (0, None)
    assert within(60, lambda: not Path("/proc", pid.read_text()).exists())
