"""An Accelerate loop with one added line. Run it on two processes of this machine:

torchrun --nproc_per_node 2 examples/accelerate_digits.py
"""

import os
from importlib import resources

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.accelerate import attach


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    with resources.files("thinwire").joinpath("lab/data/digits.npz").open("rb") as file, np.load(file) as arrays:
        images = torch.from_numpy(arrays["images"]).flatten(1).float() / 16
        labels = torch.from_numpy(arrays["labels"]).long()
    train, test = TensorDataset(images[:1437], labels[:1437]), (images[1437:], labels[1437:])

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(train, 8, shuffle=True))
    wire = attach(accelerator, model, optimizer, "dgc:density=0.02,warmup=50")  # <- the added line

    for epoch in range(int(os.environ.get("EPOCHS", "10"))):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state("runs/accelerate_digits")  # of all ranks, in one folder
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}; {wire.stats}")

    with torch.no_grad():
        x, y = (part.to(accelerator.device) for part in test)
        accelerator.print(f"test accuracy {100 * (net(x).argmax(dim=1) == y).float().mean():.1f}%")
    accelerator.end_training()


if __name__ == "__main__":
    main()
