#!/bin/bash
# Two hosts of 8 GPUs under Slurm: sbatch examples/slurm.sh, in a checkout that all hosts see, after make setup.
#SBATCH --job-name=hocket
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120

set -eu
cd "$SLURM_SUBMIT_DIR"
# Each task is one rank. TERM, 120 s before the time is over, saves; a job that is requeued goes on from there.
srun --kill-on-bad-exit=1 .venv/python -m hocket train moe_8gpu --gpus "$SLURM_NTASKS"
