"""`oxytorch plan`: what a step takes, whether it fits, and what budgets cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oxytorch import cli

pytestmark = [
    pytest.mark.cpu_only("only the memory of CPU tensors is planned"),
    pytest.mark.usefixtures("one_thread"),
]

SCRIPT = """
import torch
from torch import nn

def parts():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(32, 5))

def training():
    model = parts()
    batch = torch.randn(256, 32), torch.randint(5, (256,))
    return model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(), [batch]

def stepping():
    model, optimizer, loss_fn, [(x, y)] = training()
    def step():
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    return model, step

def alone():
    return stepping()[1]

def broken():
    return 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "training_of_six.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("function", ["training", "stepping"])
def test_it_says_what_fits(script: Path, function: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{script}:{function}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["floor_bytes"] < found["peak_bytes"] <= found["reach_bytes"]
    width = 6 * (32 * 512 + 512 + 512 * 32 + 32) + 32 * 5 + 5
    assert found["parts"]["parameters"] == 4 * width
    if function == "training":
        assert found["parts"]["optimizer state"] == 2 * 4 * width + 4 * 26  # and a counter for each parameter
    assert sum(found["parts"].values()) == found["peak_bytes"]
    peaks = [point["peak_bytes"] for point in found["curve"]]
    assert peaks == sorted(peaks, reverse=True) and found["curve"][0]["added_seconds"] == 0

    middle = (found["peak_bytes"] + found["floor_bytes"]) // 2
    words = ["plan", f"{script}:{function}", "--budget", str(middle), "--threads", "1", "--out", str(script.parent)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    page = (script.parent / "plan.html").read_text()
    for part in ("<svg", "What less memory costs", "What the peak is made of", f"Fitted to {middle}", "it fits."):
        assert part in page
    assert "it fits." in said and f"Fitted to {middle}:" in said and "selective" in said and "parameters" in said


def test_a_file_for_saved_tensors_widens_what_can_be_had(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lowest_peaks = []
    for words in ([], ["--format", "file"]):
        assert cli.main(["plan", f"{script}:training", *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        lowest_peaks.append(found["floor_bytes"])
        assert ("file keeps" in found["blocks"]) is bool(words)
    assert lowest_peaks[1] < lowest_peaks[0]
    lowest = str(lowest_peaks[1] + (lowest_peaks[0] - lowest_peaks[1]) // 2)
    assert cli.main(["plan", f"{script}:training", "--format", "file", "--budget", lowest, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["budgets"]
    assert one["fits"] and one["packed"]["file"] and one["same_bits"]


def test_a_budget_that_cannot_be_kept(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", f"{script}:training", "--budget", "1MiB", "--json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["budgets"]
    assert not one["fits"] and "the lowest peak" in one["text"]


def test_whether_other_batches_would_fit(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few, many = 512, 10**9
    assert cli.main(["plan", f"{script}:training", "--batch", str(few), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["batches"]
    activations = 6 * (512 + 512 + 32) * 4 * few  # what backward needs, at the least
    assert one["samples"] == few and activations < one["bytes"] < 3 * activations
    assert cli.main(["plan", f"{script}:training", "--batch", str(few), "--batch", str(many)]) == 1
    said = capsys.readouterr().out
    assert f"{few} samples will take" in said and f"{many} samples will take" in said and "it does not fit" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.py:training"], "there is no script"),
        (["SCRIPT:missing"], "missing"),
        (["SCRIPT:alone"], "blocks of the model are planned"),
        (["SCRIPT:broken"], "returned a int"),
        (["training"], "names no function"),
        (["SCRIPT:training", "--budget", "much"], "much"),
        (["SCRIPT:stepping", "--batch", "8"], "--batch needs (model, optimizer, loss_fn, batches)"),
    ],
)
def test_bad_usage(script: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *(word.replace("SCRIPT", str(script)) for word in words)]) == 2
    assert message in capsys.readouterr().err
