"""Where gradients come from: DistributedDataParallel, fully_shard, several backward passes in one step."""
