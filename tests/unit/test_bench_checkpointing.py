# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""launch/bench_checkpointing.py: what a variant that fails, hangs or measures nothing costs the others."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launch import bench_checkpointing as bench
from tests.distributed.harness import RankFailure, run_ranks
from tests.unit.program import run_program

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


def _measure_all(path: Path, limit: int) -> None:
    """On each rank; what it prints, and what a watchdog prints for it, goes to a file beside `path`."""
    sys.stdout = sys.stderr = open(path.with_suffix(f".{os.environ['RANK']}"), "a", buffering=1)
    dist.init_process_group("gloo")
    record = bench.Record(path, {})
    rank, several = dist.get_rank(), dist.get_world_size() > 1

    def measure(variant: str) -> dict:
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


def run(tmp_path: Path, processes: int, limit: int) -> tuple[list[str | None], dict, str]:
    """How each rank ended, the record, and what all printed."""
    path, errors = tmp_path / "a.json", [None] * processes
    try:
        run_ranks(processes, _measure_all, path, limit, joins=False, on_cpu=True)
    except RankFailure as failure:
        errors = failure.errors
    return errors, json.loads(path.read_text()), "".join(p.read_text() for p in sorted(tmp_path.glob("a.[0-9]")))


def test_a_rank_that_fails_ends_the_run_and_the_next_one_goes_on(tmp_path):
    ended, record, printed = run(tmp_path, 2, 100)
    assert ended == ["died with exit code 1"] * 2 and "torch failed on rank 1: ArithmeticError: no good" in printed
    assert record["rows"] == [{"variant": "none"}] and record["tries"] == {"torch": ["ArithmeticError: no good"]}
    ended, record, _ = run(tmp_path, 2, 100)
    assert ended == ["died with exit code 1"] * 2 and record["rows"] == [
        {"variant": "none"},
        {"variant": "saved-mxfp4"},
    ]
    assert len(record["tries"]["torch"]) == 2
    ended, _, _ = run(tmp_path, 2, 100)
    assert ended == [None, None]


def test_one_rank_alone_goes_on_after_a_failure_and_a_hang_ends(tmp_path):
    ended, record, printed = run(tmp_path, 1, 4)
    assert ended == ["died with exit code 1"] and "Timeout (0:00:04)!" in printed
    assert record["rows"] == [{"variant": "none"}, {"variant": "saved-mxfp4"}]
    assert record["tries"] == {"torch": ["ArithmeticError: no good"], "saved-fp8": ["did not end"]}


@pytest.mark.parametrize("recipe", ("bf16", "mxfp4"))
def test_a_tiny_model_on_two_ranks(recipe, tmp_path):
    path = tmp_path / "a.json"
    variants = ["none", "torch", "saved-fp8", "layers-mxfp4", "layers-mxfp4-inexact", "experts-mxfp4-offload"]
    words = ["--model", "deepseek-v3-tiny", "--recipe", recipe, "--seq-len", "64", "--micro-batch-size", "1"]
    words += ["--steps", "1", "--warmup", "0", "--output", str(path), "--variants", *variants]
    (status, printed), _ = run_program(str(ROOT / "launch/bench_checkpointing.py"), words, tmp_path, ranks=2)
    assert status is None
    record = json.loads(path.read_text())
    kept = {row["variant"]: row["kept_per_token_and_layer"] for row in record["rows"]}
    # With this recipe ds_fp4 computes the experts: the scope would have nothing to do.
    left_out = ["experts-mxfp4-offload"] if recipe == "mxfp4" else []
    assert list(kept) == [v for v in variants if v not in left_out] and not record["tries"]
    assert ("experts-mxfp4-offload is left out" in printed) == bool(left_out)
    # 0.266 of the inputs; what is too small to be packed (positions) counts in so short a sequence.
    assert kept["layers-mxfp4"] < 0.28 * kept["torch"] < 0.28 * kept["none"]
