# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""launch/bench_checkpointing.py: what a variant that fails, hangs or measures nothing costs the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import bench_checkpointing as bench

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = {"model": "m", "steps": 1}


def row(variant: str) -> dict:
    return {"variant": variant, "tokens_per_second": 1.0}


def test_a_second_run_does_what_is_missing_and_what_failed_last(tmp_path):
    path = tmp_path / "folder" / "a.json"
    record = bench.Record(path, ARGUMENTS)
    variants = ["none", "torch", "layers-mxfp4", "layers-fp8"]
    assert record.todo(variants) == variants
    record.begin("none")
    record.failed("none", "a broken pipe")
    record.begin("layers-mxfp4")
    record.finished(row("layers-mxfp4"))
    record.begin("torch")  # and the process is killed

    record = bench.Record(path, ARGUMENTS)
    assert record.tries == {"none": ["a broken pipe"], "torch": ["did not end"]}
    assert record.todo(variants) == ["layers-fp8", "none", "torch"]
    record.begin("none")
    record.failed("none", "a broken pipe again")
    record.begin("torch")
    record.finished(row("torch"))
    record = bench.Record(path, ARGUMENTS)
    assert record.todo(variants) == ["layers-fp8"], "two tries are enough"
    assert [row["variant"] for row in record.rows] == ["torch", "layers-mxfp4"]
    assert not list(path.parent.glob("*.json.*"))
    record.begin("layers-fp8")
    record.failed("layers-fp8", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB")
    assert bench.Record(path, ARGUMENTS).todo(variants) == [], "it would lack memory again"


def test_numbers_of_other_arguments_are_not_mixed(tmp_path):
    path = tmp_path / "a.json"
    bench.Record(path, ARGUMENTS).begin("none")
    with pytest.raises(ValueError, match="has numbers of other arguments.*Give another --output, or remove the file"):
        bench.Record(path, {**ARGUMENTS, "steps": 2})


SCRIPT = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from launch import bench_checkpointing as bench

dist.init_process_group("gloo")
path, limit = Path(sys.argv[1]), int(sys.argv[2])
record = bench.Record(path, {})
rank, several = dist.get_rank(), dist.get_world_size() > 1

def measure(variant):
    if variant == "torch" and (rank == 1 or not several):
        raise ArithmeticError("no good")
    if variant == "saved-fp8":
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
    return {"variant": variant}

todo = record.todo(["none", "torch", "saved-mxfp4", *(["saved-fp8"] if limit < 60 else [])])
dist.barrier()
bench.measure_all(todo, record, measure, limit, print if rank == 0 else lambda *_, **__: None)
dist.destroy_process_group()
"""


def run(tmp_path: Path, processes: int, limit: int) -> tuple[int, dict, str]:
    script, path = tmp_path / "script.py", tmp_path / "a.json"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        + [str(script), str(path), str(limit)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, json.loads(path.read_text()), done.stdout + done.stderr


def test_a_rank_that_fails_ends_the_run_and_the_next_one_goes_on(tmp_path):
    code, record, printed = run(tmp_path, 2, 100)
    assert code != 0 and "torch failed on rank 1: ArithmeticError: no good" in printed
    assert record["rows"] == [{"variant": "none"}] and record["tries"] == {"torch": ["ArithmeticError: no good"]}
    code, record, _ = run(tmp_path, 2, 100)
    assert code != 0 and record["rows"] == [{"variant": "none"}, {"variant": "saved-mxfp4"}]
    assert len(record["tries"]["torch"]) == 2
    code, _, _ = run(tmp_path, 2, 100)
    assert code == 0


def test_one_rank_alone_goes_on_after_a_failure_and_a_hang_ends(tmp_path):
    code, record, printed = run(tmp_path, 1, 4)
    assert code != 0 and "Timeout (0:00:04)!" in printed
    assert record["rows"] == [{"variant": "none"}, {"variant": "saved-mxfp4"}]
    assert record["tries"] == {"torch": ["ArithmeticError: no good"], "saved-fp8": ["did not end"]}


@pytest.mark.parametrize("recipe", ("bf16", "mxfp4"))
def test_a_tiny_model_on_two_ranks(recipe, tmp_path):
    path = tmp_path / "a.json"
    variants = ["none", "torch", "saved-fp8", "layers-mxfp4", "layers-mxfp4-inexact", "experts-mxfp4-offload"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "launch/bench_checkpointing.py"), "--model", "deepseek-v3-tiny", "--recipe", recipe]
    command += ["--seq-len", "64", "--micro-batch-size", "1", "--steps", "1", "--warmup", "0", "--output", str(path)]
    done = subprocess.run(
        [*command, "--variants", *variants],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(path.read_text())
    kept = {row["variant"]: row["kept_per_token_and_layer"] for row in record["rows"]}
    # With this recipe ds_fp4 computes the experts: the scope would have nothing to do.
    left_out = ["experts-mxfp4-offload"] if recipe == "mxfp4" else []
    assert list(kept) == [v for v in variants if v not in left_out] and not record["tries"]
    assert ("experts-mxfp4-offload is left out" in done.stdout) == bool(left_out)
    # 0.266 of the inputs; what is too small to be packed (positions) counts in so short a sequence.
    assert kept["layers-mxfp4"] < 0.28 * kept["torch"] < 0.28 * kept["none"]
