"""Tables of the race of the step tail."""

from __future__ import annotations

import numpy as np
from _race import over_starts, ratio, text

from .documents import Document, measured, read, table

CASES = ("16 x 4M", "200 x 1,000", "200 x 64", "1,000 x up to 512", "16 x 64K, a fifth decayed")


def times(document: Document, case: str) -> dict[str, np.ndarray]:
    """Seconds of a case by contender, start and round."""
    return {name: np.array(values) for name, values in document["cases"].get(case, {}).items()}


def tail_ratio(document: Document, case: str, rival: str, ours: str) -> str:
    """How many times as long the rival takes."""
    known = times(document, case)
    return text(ratio(known, rival, ours)) if {rival, ours} <= known.keys() else "not measured"


def step_tail() -> str | None:
    """Clip, AdamW and moving average over torch's."""
    document = read("step_tail.json")
    if document is None:
        return None
    rows = [
        [
            case,
            tail_ratio(document, case, "torch fused", "oxytorch"),
            tail_ratio(document, f"{case}, scaler", "torch fused", "oxytorch"),
            tail_ratio(document, f"{case}, C++", "torch::optim", "oxytorch"),
        ]
        for case in CASES
    ]
    head = ["tensors", "torch fused + clip + foreach average", "the same under a loss scale"]
    head += ["C++ `torch::optim` + clip + `lerp_`"]
    return table(head, rows) + "\n\n" + tail_source(document)


def tail_source(document: Document) -> str:
    """Where the figures of the step tail come from."""
    starts = [len(np.atleast_2d(turns)) for times in document["cases"].values() for turns in times.values()]
    return measured("python bench/race/step_tail.py", "step_tail.json", document, starts)


def narrow() -> str | None:
    """8-bit state over torch's fp32 tail and over the other packages' 8-bit optimizers."""
    document = read("step_tail.json")
    if document is None:
        return None
    case, ours = "16 x 4M, int8 state", "oxytorch, int8 state"
    rivals = {
        "torch fused, fp32 state": "torch fused",
        "bitsandbytes": "bitsandbytes AdamW8bit",
        "torchao, compiled": "torchao AdamW8bit, compiled",
    }
    rows = [[said, tail_ratio(document, case, name, ours)] for said, name in rivals.items()]
    return (
        table(["64M parameters, clip and average included", "time over int8 state's"], rows)
        + "\n\n"
        + tail_source(document)
    )


def training() -> str | None:
    """What the step tail is of a whole training step."""
    document = read("step_tail.json")
    if document is None:
        return None
    rows = []
    for case in ("training gpt", "training cnn", "training mlp"):
        known = times(document, case)
        share = over_starts(known["torch fused: tail"] / known["torch fused"])
        rows.append(
            [case.removeprefix("training "), f"{text(share, 100)}", text(ratio(known, "torch fused", "oxytorch"))]
        )
    head = ["step, fp32", "per cent of it in torch's best tail", "torch's whole step, over ours"]
    return table(head, rows) + "\n\n" + tail_source(document)
