"""Your own loop with Oxytorch's optimizer and loss scaler: unscale, check, clip, update and average are one pass."""

from __future__ import annotations

import oxytorch as ox
import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = ox.optim.AdamW(model.parameters(), lr=2e-3, clip_norm=1.0, ema_decay=0.99)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    scaler = ox.amp.GradScaler("cpu", init_scale=1024.0)

    for step in range(200):
        inputs = torch.randn(256, 32)
        with torch.no_grad():
            targets = teacher(inputs)
        loss = nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            norm = optimizer.tail_stats().grad_norm
            print(f"step {step:3d}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}")

    inputs = torch.randn(4096, 32)
    with torch.no_grad(), optimizer.ema_weights():
        print(f"averaged weights: loss {nn.functional.mse_loss(model(inputs), teacher(inputs)).item():.4f}")


if __name__ == "__main__":
    main()
