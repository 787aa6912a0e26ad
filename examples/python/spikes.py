"""A bad batch in the middle of training: found, rolled back, and a NaN traced to the module that made it."""

from __future__ import annotations

import oxytorch as ox
import torch
from torch import nn


class Rescale(nn.Module):
    """Divides by the spread of each sample, which nothing keeps from being zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide each row by its standard deviation."""
        return x / x.std(1, keepdim=True)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Rescale(), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = ox.optim.AdamW(model.parameters(), lr=1e-3, clip_norm=1.0)
    guard = ox.optim.NumericalStabilityManager(optimizer, "rollback", model=model, every=50)

    for step in range(300):
        inputs = torch.randn(64, 16)
        targets = inputs.mean(1, keepdim=True)
        if step == 180:
            targets = targets * 1e4  # a file in other units
        if step == 240:
            inputs[7] = 0  # a blank sample

        def compute_loss(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            return nn.functional.mse_loss(model(inputs), targets)

        loss = compute_loss()
        loss.backward()
        guard.step(loss)
        optimizer.zero_grad()
        if guard.rolled_back and not loss.isfinite():
            print(guard.explain(compute_loss))
    print(guard.report())


if __name__ == "__main__":
    main()
