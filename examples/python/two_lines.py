"""The least that a training script has to change: make a Trainer, call its step."""

from __future__ import annotations

import oxytorch as ox
import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = ox.Trainer(model, optimizer, nn.CrossEntropyLoss(), config="advanced", clip_norm=1.0)

    for step in range(60):
        # Is the bright half on the left or on the right?
        labels = torch.randint(2, (64,))
        images = torch.randn(64, 1, 16, 16)
        images[labels == 0, :, :, :8] += 1.0
        images[labels == 1, :, :, 8:] += 1.0
        loss = trainer.step((images, labels))
        if step % 20 == 0:
            print(f"step {step:2d}  loss {loss.item():.4f}")

    print(trainer.report())


if __name__ == "__main__":
    main()
