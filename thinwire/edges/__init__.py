"""Where gradients come from: DistributedDataParallel, the optimizer, loss scaling."""
