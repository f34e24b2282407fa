#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
#
# Starts the main job on a Slurm cluster:
#
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh --recipe mxfp4 --output /shared/runs/first
#
# One task per node runs the deepspeed launcher, which starts one process per GPU. Nodes need neither ssh among each other
# nor MPI (--no_ssh); they need the same checkout and the same virtual environment, and a shared folder for --output.
# PYTHON names the interpreter of that environment, PROCESSES_PER_NODE the processes of a node if not its GPUs,
# MASTER_PORT the rendezvous' port on the first node.
#SBATCH --job-name=ds_fp4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --output=ds_fp4-%j.log
set -euo pipefail

# Slurm runs a copy of this script, so the checkout is where sbatch was called.
root=${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
cd "$root"
if ! [[ -f launch/pretrain.py ]]; then
    echo "$root holds no launch/pretrain.py: call sbatch in the checkout of ds_fp4" >&2
    exit 2
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
hostfile=$(mktemp "$root/.hostfile-$SLURM_JOB_ID-XXXX") # in the checkout: every node reads it
trap 'rm -f "$hostfile"' EXIT
printf "%s slots=$processes\n" "${nodes[@]}" > "$hostfile"

# Each task knows its node's number as SLURM_NODEID. The port comes from the job, so that two jobs on a node do not meet.
srun --kill-on-bad-exit=1 bash -c '
    exec "$0" -m deepspeed.launcher.runner --hostfile "$1" --no_ssh --node_rank "$SLURM_NODEID" \
        --master_addr "$2" --master_port "$3" launch/pretrain.py "${@:4}"
' "${PYTHON:-python3}" "$hostfile" "${nodes[0]}" "${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}" "$@"
