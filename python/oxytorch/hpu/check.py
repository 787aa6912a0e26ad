"""What could not be tried without a Gaudi card, tried on one: a verdict a line.

``python -m oxytorch.hpu`` takes some seconds on a card. Exit status: 0 nothing failed, 1 something did, 2 there is no
usable card.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from .. import amp, optim
from . import BRIDGE, FusedAdamW, cards, counters, fallback_operators, is_lazy, mark_steps, memory, status

Verdict = tuple[str, str]  # PASS, FAIL or TELL, and what was seen


def good(holds: bool, seen: str) -> Verdict:
    """PASS or FAIL."""
    return ("PASS" if holds else "FAIL"), seen


def _train(device: str, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 10) -> list[float]:
    """Losses of a small model, with the same weights and data on every device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 8))
    inputs, targets = torch.randn(256, 64), torch.randn(256, 8)
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    optimizer = make(list(model.parameters()))
    losses = []
    with mark_steps():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    return losses


def _apart(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def card() -> Verdict:
    """The backend, the library and the card of this process."""
    told = status()
    own = [one for one in cards() if one.own]
    seen = f"{told.reason}; HLML {told.hlml or 'unknown'}, driver {told.driver or 'unknown'}, {len(cards())} cards"
    if own:
        seen += f"; this process has {own[0].name} (module {own[0].module}, device file {own[0].minor})"
    return good(told.usable and bool(own), seen)


def meters() -> Verdict:
    """Whether every meter tells, and tells what a card can be."""
    own = next((one for one in cards() if one.own), None)
    if own is None:
        return "FAIL", "no card is known to be this process's"
    limits = {"power": (20, 1500), "temperature": (10, 110), "clock": (100, 5000), "memory_total": (2**33, 2**39)}
    strange = [
        f"{k} {own.values[k]:g} {own.units[k]}" for k, (a, b) in limits.items() if not a <= own.values.get(k, a) <= b
    ]
    silent = [f"{name}: {why}" for name, why in own.unknown.items()]
    return good(not strange, "; ".join(strange + silent) or f"all {len(own.values)} meters tell something possible")


def energy_unit() -> Verdict:
    """Whether energy is in joules: it must grow as power says."""
    found = [(time.monotonic(), next(one for one in cards() if one.own).values)]
    time.sleep(3)
    found.append((time.monotonic(), next(one for one in cards() if one.own).values))
    if any(not {"energy", "power"} <= values.keys() for _, values in found):
        return "TELL", "this card tells no energy or no power"
    (start, first), (end, last) = found
    grown, expected = last["energy"] - first["energy"], (end - start) * (first["power"] + last["power"]) / 2
    return good(0.3 * expected <= grown <= 3 * expected, f"grew by {grown:.0f} J where power says {expected:.0f} J")


def memory_agrees() -> Verdict:
    """Whether the bridge's memory follows an allocation of 64 MiB, and the card's own word after it."""
    before = memory()
    held = torch.ones(2**24, device="hpu")
    torch.hpu.synchronize()  # type: ignore[attr-defined]
    after = memory()
    del held
    if before.in_use is None or after.in_use is None:
        return "FAIL", "torch.hpu.memory_stats has no InUse"
    grown = after.in_use.value - before.in_use.value
    used = "unknown" if after.card_used is None else f"{after.card_used.value / 2**30:.2f} GiB"
    return good(2**26 <= grown < 2**27, f"InUse grew by {grown} bytes; the card says {used} used")


def streams_and_events() -> Verdict:
    """What of torch's generic device interfaces the bridge fills; the backend does without what is not there."""
    has = []
    stream = torch.Stream("hpu")
    event = torch.Event("hpu")
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("event", lambda: event.record(stream)),
        ("event synchronise", event.synchronize),
        ("stream synchronise", stream.synchronize),
        ("stream query", stream.query),
        ("wait for event", lambda: stream.wait_event(event)),
    )
    for name, call in calls:
        try:
            call()
            has.append(name)
        except Exception as error:  # noqa: PERF203 (the guard leaves it out)
            has.append(f"no {name} ({str(error).splitlines()[0][:60]})")
    return "TELL", ", ".join(has)


def copies() -> Verdict:
    """Whether bytes come back as they went, also by copies that do not block."""
    there = torch.arange(2**20, dtype=torch.int32)
    back = there.to("hpu", non_blocking=True).add_(1).to("cpu")
    return good(bool(torch.equal(back, there + 1)), "1 Mi integers, one added on the card")


def optimizer() -> Verdict:
    """oxytorch.optim.AdamW on the card against the CPU."""
    make = lambda params: optim.AdamW(params, lr=1e-2, clip_norm=1.0)  # noqa: E731
    apart = _apart(_train("hpu", make), _train("cpu", make))
    return good(apart < 1e-2, f"losses of 10 steps are at most {apart:.1e} from the CPU's")


def fused() -> Verdict:
    """Habana's FusedAdamW and FusedClipNorm against torch's recurrence, at an eps too small to tell them apart."""
    ours = _train("hpu", lambda params: FusedAdamW(params, lr=1e-2, eps=1e-12, clip_norm=1.0))
    peer = _train("cpu", lambda params: optim.AdamW(params, lr=1e-2, eps=1e-12, clip_norm=1.0))
    return good(
        _apart(ours, peer) < 1e-2, f"losses of 10 steps are at most {_apart(ours, peer):.1e} from torch's recurrence"
    )


def autocast() -> Verdict:
    """Whether autocast computes products in bfloat16."""
    a = torch.randn(64, 64, device="hpu")
    with amp.autocast("hpu", torch.bfloat16):
        product = a @ a
    return good(product.dtype is torch.bfloat16, f"a product is {product.dtype}")


def telemetry() -> Verdict:
    """Whether a new shape is counted as a recompilation."""
    before = counters()
    (torch.randn(37, 41, device="hpu") @ torch.randn(41, 43, device="hpu")).sum().item()
    after = counters()
    if "recompiles" not in after.values:
        return "FAIL", after.unknown.get("recompiles", "no counter")
    grown = after.values["recompiles"] - before.values["recompiles"]
    return good(grown > 0, f"recompilations grew by {grown:g}; silent: {sorted(after.unknown) or 'none'}")


def fallbacks() -> Verdict:
    """Which operators of the checks before ran on the CPU."""
    found = fallback_operators()
    return "TELL", ", ".join(f"{name} {times} times" for name, times in found.items()) or "no operator fell back"


def lazy_mode() -> Verdict:
    """Whether the bridge is lazy, and our way to tell agrees with its own."""
    with mark_steps() as marks:
        return good(marks == is_lazy(), f"lazy mode is {'on' if is_lazy() else 'off'}")


CHECKS: tuple[Callable[[], Verdict], ...] = (
    card, meters, energy_unit, memory_agrees, streams_and_events, copies, optimizer, fused, autocast, telemetry,
    fallbacks, lazy_mode,
)  # fmt: skip


def verdicts() -> Iterator[tuple[str, str, str]]:
    """Each check's name, verdict and what was seen; a check that raises has failed."""
    for check in CHECKS:
        try:
            verdict, seen = check()
        except Exception as error:  # nothing here may end the others
            verdict, seen = "FAIL", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield check.__name__, verdict, seen


def main() -> int:
    """Print the verdicts; return the exit status."""
    try:
        importlib.import_module(BRIDGE)
    except ImportError as error:
        print(f"{BRIDGE} cannot be imported: {error}")
    told = status()
    if not told.usable:
        print(f"no Gaudi card is usable here: {told.reason}")
        return 2
    failed = 0
    for name, verdict, seen in verdicts():
        print(f"{verdict}  {name:<20} {seen}", flush=True)
        failed += verdict == "FAIL"
    print(f"{len(CHECKS)} checks, {failed} failed")
    return 1 if failed else 0
