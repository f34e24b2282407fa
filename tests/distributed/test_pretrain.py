# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The main job on two processes: it learns, resumes exactly, compares recipes, and starts under its launchers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import RankFailure, free_port, run_ranks

ROOT = Path(__file__).resolve().parents[2]
MICRO_MODEL = {
    "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 256, "router_aux_loss_coef": 0.02, "vocab_size": 320, "initializer_range": 0.02,
}  # fmt: skip
SMALL = ["--seq-len", "64", "--batch-size", "8", "--micro-batch-size", "2", "--eval-tokens", "1280", "--lr", "3e-3"]


def pretrain(arguments: list[str]) -> None:
    """Runs the job in this rank, as its launchers do."""
    sys.argv = ["pretrain.py", *arguments]
    from launch.pretrain import main

    main()


def lines(path: Path) -> tuple[list[dict], list[float]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [r for r in records if "loss" in r], [r["held_out_loss"] for r in records if "held_out_loss" in r]


def learned(records: list[dict]) -> dict[int, tuple[float, float, float]]:
    """What must not depend on being interrupted."""
    return {r["step"]: (r["loss"], r["grad_norm"], r["lr"]) for r in records}


@pytest.fixture
def job(tmp_path) -> list[str]:
    (tmp_path / "micro.json").write_text(json.dumps(MICRO_MODEL))
    library = Path(json.__file__).parent
    return ["--model", str(tmp_path / "micro.json"), "--data", str(library), str(library.parent / "email"), *SMALL]


@pytest.mark.parametrize("moe", ["autoep", "classic"])
def test_resuming_gives_the_losses_of_an_unbroken_run(moe, job, tmp_path):
    job += [
        "--moe",
        moe,
        "--recipe",
        "mxfp4",
        "--steps",
        "8",
        "--save-every",
        "3",
        "--eval-every",
        "4",
        "--output",
        str(tmp_path),
    ]
    run_ranks(2, pretrain, job, joins=False)
    log, checkpoints = tmp_path / "mxfp4-seed0.jsonl", tmp_path / "mxfp4-seed0.checkpoints"
    unbroken, held_out = lines(log)
    assert list(learned(unbroken)) == list(range(1, 9)) and len(held_out) == 2
    assert unbroken[-1]["loss"] < unbroken[0]["loss"] - 1.0

    # As if it had been killed during step 5: one checkpoint, and two steps logged since.
    shutil.rmtree(checkpoints / "step6")
    (checkpoints / "latest").write_text("step3")
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines() if json.loads(line)["step"] <= 5))
    run_ranks(2, pretrain, [*job, "--resume"], joins=False)
    resumed, held_out_again = lines(log)
    assert learned(resumed) == learned(unbroken) and held_out_again == held_out

    if moe == "autoep":
        with pytest.raises(
            RankFailure, match="the data would not continue where it stopped.*seq_len: 64 then, 32 now"
        ):
            run_ranks(2, pretrain, [*job, "--resume", "--seq-len", "32"], joins=False)
        with pytest.raises(RankFailure, match="--resume: no checkpoint in"):
            run_ranks(2, pretrain, [*job, "--resume", "--seed", "5"], joins=False)


def test_a_run_can_start_from_another_runs_weights(job, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(
        2,
        pretrain,
        [*job, "--recipe", "bf16", "--steps", "4", "--save-every", "4", "--output", str(first)],
        joins=False,
    )
    start = ["--init-from", str(first / "bf16-seed0.checkpoints")]
    run_ranks(
        2, pretrain, [*job, *start, "--compare", "bf16", "mxfp4", "--steps", "2", "--output", str(second)], joins=False
    )
    trained, _ = lines(first / "bf16-seed0.jsonl")
    for recipe in ("bf16", "mxfp4"):
        records, _ = lines(second / f"{recipe}-seed0.jsonl")
        assert [record["step"] for record in records] == [1, 2]
        assert records[0]["loss"] < trained[0]["loss"] - 0.5
    with pytest.raises(RankFailure, match="--init-from .*: no checkpoint there"):
        run_ranks(2, pretrain, [*job, "--init-from", str(tmp_path), "--output", str(second)], joins=False)


def test_processes_share_one_global_batch(job, tmp_path):
    losses = []
    for world in (1, 2):
        run_ranks(
            world,
            pretrain,
            [*job, "--recipe", "bf16", "--steps", "3", "--output", str(tmp_path / str(world))],
            joins=False,
        )
        records, held_out = lines(tmp_path / str(world) / "bf16-seed0.jsonl")
        losses.append([record["loss"] for record in records] + held_out)
        assert all((record["forward_bytes"] > 0) == (world > 1) for record in records)
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_recomputed_legs_are_counted_apart(job, tmp_path):
    run_ranks(
        2,
        pretrain,
        [*job, "--recipe", "bf16", "--steps", "1", "--gradient-checkpointing", "--output", str(tmp_path)],
        joins=False,
    )
    (record,), _ = lines(tmp_path / "bf16-seed0.jsonl")
    assert record["recompute_bytes"] == record["forward_bytes"] == record["backward_bytes"] > 0


def test_other_text_on_one_rank_is_refused(job, tmp_path):
    with pytest.raises(RankFailure, match=r"Ranks \[1\] read other text than rank 0"):
        run_ranks(2, pretrain_on_text_of_its_own, job, str(tmp_path), joins=False)


def pretrain_on_text_of_its_own(arguments: list[str], folder: str) -> None:
    for i in range(2):
        Path(folder, f"{os.environ['RANK']}-{i}.txt").write_text(f"text {i} of rank {os.environ['RANK']}")
    own = [str(Path(folder, f"{os.environ['RANK']}-{i}.txt")) for i in range(2)]
    pretrain([*arguments, "--data", *own, "--output", folder])


def run_launcher(command: list[str], **environment: str) -> str:
    """Runs a launcher on CPUs and returns what it printed."""
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
    return run.stdout


def test_comparison_under_the_deepspeed_launcher(job, tmp_path):
    printed = run_launcher([
        sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--num_gpus", "2", "--master_port", str(free_port()),
        "launch/pretrain.py", *job, "--compare", "bf16", "mxfp4", "--seeds", "0", "1", "--steps", "4",
        "--output", str(tmp_path),
    ])  # fmt: skip
    table = printed[printed.index("recipe  ") :].splitlines()
    assert table[2].startswith("bf16 ") and "(1.000x)" in table[2] and table[3].startswith("mxfp4 ")
    compared = json.loads((tmp_path / "compare.json").read_text())["comparison"]
    # Records of 128 values are padded from 68 and 129 bytes to multiples of 16.
    # MXFP4 on dispatch, FP8 on combine
    forward = compared["mxfp4"]["forward_bytes"] / compared["bf16"]["forward_bytes"]
    assert forward == pytest.approx((80 + 144) / (2 * 256), rel=0.02)
    assert compared["mxfp4"]["backward_bytes"] / compared["bf16"]["backward_bytes"] == pytest.approx(
        144 / 256, rel=0.02
    )
    assert 0 < abs(compared["mxfp4"]["difference_percent"]) < 1.0
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    assert len(list(tmp_path.glob("*-seed*.jsonl"))) == 4


def test_jobs_give_the_losses_of_one_job_that_does_all_runs(job, tmp_path):
    words = [*job, "--compare", "bf16", "mxfp4", "--seeds", "0", "1", "--steps", "3"]
    shared = [sys.executable, "launch/jobs.py", "--jobs", "2", "--processes", "1", "--output", str(tmp_path / "jobs")]
    printed = run_launcher([*shared, *words])
    run_ranks(1, pretrain, [*words, "--output", str(tmp_path / "one")], joins=False)
    assert "4 of 4 runs to do, 2 jobs at a time" in printed and "(4 of 4, " in printed
    assert "recipe  " in printed and "Up to 2 jobs ran at a time" in printed
    for name in ("bf16-seed0", "mxfp4-seed0", "bf16-seed1", "mxfp4-seed1"):
        (one, held_out), (shared, shared_held_out) = (lines(tmp_path / f / f"{name}.jsonl") for f in ("one", "jobs"))
        assert len(one) == 3 and learned(one) == learned(shared) and held_out == shared_held_out
    assert (tmp_path / "jobs" / "compare.png").exists()


def test_torchrun(job, tmp_path):
    run_launcher([
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
        "launch/pretrain.py", *job, "--recipe", "fp8", "--moe", "classic", "--steps", "2", "--output", str(tmp_path),
    ])  # fmt: skip
    records, held_out = lines(tmp_path / "fp8-seed0.jsonl")
    assert len(records) == 2 and len(held_out) == 1
