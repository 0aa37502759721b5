"""Callbacks and helpers for frameworks that own the training loop; each file needs its framework installed.

from thinwire.integrations.huggingface import ThinwireCallback    # transformers.Trainer
from thinwire.integrations.lightning import ThinwireCallback      # lightning.pytorch.Trainer
from thinwire.integrations.accelerate import attach               # accelerate.Accelerator
"""
