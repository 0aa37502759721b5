#!/bin/bash
# One task a node under Slurm, submitted from the repository: sbatch examples/slurm.sh [options of thinwire train]
#SBATCH --job-name=thinwire
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120      # two minutes before the end: the workers save a checkpoint, and a requeued job goes on

set -euo pipefail

# What torch.distributed asks for; the first node of the job is where the workers meet.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
# export GLOO_SOCKET_IFNAME=eth0    # where a node has several networks

RUN=${RUN:-runs/$SLURM_JOB_ID}
if [ -e "$RUN/config.json" ]; then
    set -- --resume "$RUN"
else
    set -- --recipe digits --method dgc:density=0.01,warmup=72 --compare dense --out "$RUN" "$@"
fi

# Your own DDP script goes in place of "thinwire train": it needs nothing but these four variables.
srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE \
    exec thinwire train "$@"' thinwire "$@"
