"""A monitor beside a plain loop: where the time of a step goes, as a table, as JSON lines and as a page."""

from __future__ import annotations

import oxytorch as ox
import torch
from torch import nn


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ox.PerformanceMonitor(sinks=[ox.monitor.Jsonl("run.jsonl")]) as monitor:
        for _ in range(100):
            inputs, targets = torch.randn(128, 64), torch.randint(10, (128,))
            with monitor.step(samples=128):
                with monitor.phase("forward"):
                    loss = nn.functional.cross_entropy(model(inputs), targets)
                with monitor.phase("backward"):
                    loss.backward()
                with monitor.phase("update"):
                    optimizer.step()
                    optimizer.zero_grad()
                monitor.scalar("loss", loss)
    print(monitor.table())
    monitor.report("A small network").to_html("run.html")
    print("steps in run.jsonl, page in run.html")


if __name__ == "__main__":
    main()
