#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ds_fp4 Team
#
# Starts the main job with Open MPI's mpirun; the ranks find each other through mpi4py (pip install 'ds_fp4[mpi]').
#
#   launch/mpirun.sh 2 --recipe mxfp4                         two processes on this machine
#   HOSTFILE=launch/hostfile launch/mpirun.sh 16 --recipe mxfp4   sixteen processes on the hostfile's nodes
#
# The first argument is the number of processes, the rest goes to launch/pretrain.py. PYTHON names another interpreter,
# MASTER_PORT another port for the rendezvous, MPIRUN_ARGS more options of mpirun (network interfaces, say).
set -euo pipefail

if ! [[ "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 PROCESSES [options of launch/pretrain.py]; PROCESSES was '${1:-}'" >&2
    exit 2
fi
processes=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# --bind-to none: by default mpirun pins each process to one core, and with it NCCL's and the data's threads.
# -x: environment variables do not travel to other nodes by themselves.
exec mpirun -np "$processes" --bind-to none \
    ${HOSTFILE:+--hostfile "$HOSTFILE"} \
    -x PATH ${LD_LIBRARY_PATH:+-x LD_LIBRARY_PATH} ${PYTHONPATH:+-x PYTHONPATH} ${DS_ACCELERATOR:+-x DS_ACCELERATOR} \
    ${OMP_NUM_THREADS:+-x OMP_NUM_THREADS} -x MASTER_PORT="${MASTER_PORT:-29500}" \
    ${MPIRUN_ARGS:-} \
    "${PYTHON:-python3}" "$root/launch/pretrain.py" "$@"
