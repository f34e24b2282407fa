# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""What `ds-fp4` makes of its words: launcher arguments, scripts and modules, the report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_fp4.cli import main, report
from ds_fp4.cli.run import launcher_arguments
from tests.unit.program import run_program

RUN = ["--module", "ds_fp4.cli.run_script"]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["train.py", "--num_gpus", "3"], [*RUN, "train.py", "--num_gpus", "3"]),
        (["--num_gpus", "2", "train.py", "--module"], ["--num_gpus", "2", *RUN, "train.py", "--module"]),
        (["train.py", "--", "--x"], [*RUN, "train.py", "--", "--x"]),
        (["-q", "--", "train.py", "--x"], ["-q", *RUN, "train.py", "--x"]),
        (["-q", "--module", "pkg.m", "-a"], ["-q", *RUN, "-m", "pkg.m", "-a"]),
        (["-q", "-m", "pkg.m", "-m", "x"], ["-q", *RUN, "-m", "pkg.m", "-m", "x"]),
        (["train.py", "-m", "x"], [*RUN, "train.py", "-m", "x"]),
        (["train.py", "train.py"], [*RUN, "train.py", "train.py"]),
    ],
)
def test_launcher_arguments(words, expected):
    assert launcher_arguments(words) == expected


def test_no_python_is_refused():
    with pytest.raises(SystemExit, match="leave it out"):
        launcher_arguments(["--no_python", "train.py"])


SCRIPT = "import sys, beside; print(__name__, 'ds_fp4' in sys.modules, *sys.argv[1:])"


def _files(folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("")


def test_a_launched_process_runs_the_script_itself(tmp_path):
    _files(tmp_path)
    environment = {**os.environ, "RANK": "0", "DS_ACCELERATOR": "cpu"}
    # By the file, as the installed program does: the working folder is not on the path then.
    command = [sys.executable, main.__file__, "run", "script.py", "--x", "y"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("__main__ True") and done.stdout.rstrip().endswith("--x y")


@pytest.mark.parametrize(
    "words", (["script.py"], ["-m", "script"], ["--module", "script"], ["--local_rank=0", "script.py"])
)
def test_ways_to_name_the_script(words, tmp_path):
    _files(tmp_path)
    [(status, printed)] = run_program(main.__file__, ["run", *words, "--x", "y"], tmp_path)
    assert status == 0
    assert printed.splitlines()[-1].startswith("__main__ True") and printed.rstrip().endswith("--x y")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--num_gpus", "2", "script.py"], "expected a script, got --num_gpus"),
        (["nothing.py"], "'nothing.py' is not a file"),
        (["-m"], "no script given"),
    ],
)
def test_a_launched_process_without_a_script(words, message, tmp_path):
    _files(tmp_path)
    [(status, printed)] = run_program(main.__file__, ["run", *words], tmp_path)
    assert isinstance(status, str) and message in status and "__main__" not in printed


def test_the_report_names_the_kernels_in_use(monkeypatch, capsys):
    loaded = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(report.ops, "load_kernels", lambda: loaded.append(1))
    monkeypatch.setattr(report.ops, "describe_kernels", lambda: "builder" if loaded else "not loaded yet")
    assert main.main(["report"]) == 0
    assert "kernels       builder" in capsys.readouterr().out


def test_the_report_says_why_kernels_cannot_be_loaded(monkeypatch, capsys):
    def fail() -> None:
        raise RuntimeError("there is no nvcc")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(report.ops, "load_kernels", fail)
    assert main.main(["report"]) == 1
    assert "kernels       CANNOT BE LOADED: there is no nvcc" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("experts --skew nan", "number of at least 0, got 'nan'"),
        ("experts --skew -1", "number of at least 0, got '-1'"),
        (f"experts --json {__file__}/y.json", "y.json cannot be written"),
        ("all-to-all --tokens 0", "whole number of at least 1, got '0'"),
        ("all-to-all --json .", ". cannot be written"),
        (f"kernels --plot {__file__}/x.png", "x.png cannot be written"),
        ("kernels --budget inf", "number of at least 0, got 'inf'"),
    ],
)
def test_benchmarks_refuse_what_cannot_work(words, message, capsys):
    with pytest.raises(SystemExit):
        main.main(["bench", *words.split()])
    assert message in capsys.readouterr().err
