"""oxytorch.hpu over the fake device, the fake libhlml.so and the fake Habana package; a process each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
import torch_device

pytestmark = pytest.mark.cpu_only("starts processes with devices of their own")

ROOT = Path(__file__).resolve().parents[2]
FAKES = torch_device.BUILD / "tests" / "hpu"
PREAMBLE = """
import copy, json, sys
import torch
import habana_frameworks.torch as ht
import oxytorch as ox
def model(device="hpu", dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(device, dtype)
def grads(module, seed):
    torch.manual_seed(seed)
    for p in module.parameters():
        p.grad = torch.randn(p.shape).to(p.device, p.dtype)
"""


def run(tmp_path: Path, code: str, *lines: str, preamble: str = PREAMBLE, module: str = "", **variables: str) -> str:
    """Run code, or a module, as on a Gaudi machine; return what it prints."""
    scenario = tmp_path / "scenario"
    scenario.write_text("\n".join(["cards=1", *lines]) + "\n")
    path = os.pathsep.join([str(ROOT / "tests" / "hpu" / "fake"), *filter(None, sys.path)])
    fakes = {"FAKE_HLML": str(scenario), "OXYTORCH_HLML": str(FAKES / "libhlml.so")}
    device = {"OXYTORCH_DEVICE": "hpu", "OXYTORCH_FAKE": "one_device", "OXYTORCH_SIM": "latency_us=0,memory=1GiB"}
    environment = {**os.environ, **fakes, **device, "PYTHONPATH": path, **variables}
    for name in ("HLS_MODULE_ID", "HABANA_VISIBLE_MODULES", "PT_HPU_LAZY_MODE"):
        environment.pop(name, None) if name not in variables else None
    command = [sys.executable, "-m", module] if module else [sys.executable, "-c", preamble + code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    torch_device.check(done)
    return done.stdout


def told(*arguments: Any, **variables: Any) -> Any:
    return json.loads(run(*arguments, **variables).splitlines()[-1])


@pytest.mark.skipif(os.environ.get("OXYTORCH_DEVICE") == "hpu", reason="here the fake is a card")
def test_here_without_a_card_everything_says_why() -> None:
    status = ox.hpu.status()
    assert not status.usable and status.reason and status.problem
    assert ox.hpu.cards() == []
    reading = ox.hpu.counters()
    assert reading.unknown["recompiles"] == "habana_frameworks.torch is not imported"
    assert ox.hpu.fallback_operators() == {}
    assert ox.hpu.memory().card_total is None
    ox.hpu.mark_step()
    with ox.hpu.mark_steps() as marks:
        assert not marks
    with pytest.raises(NotImplementedError, match=r"Habana's FusedAdamW is not here: .*oxytorch\.optim\.AdamW"):
        ox.hpu.FusedAdamW([])


def test_a_torch_half_that_is_missing_is_named(tmp_path: Path) -> None:
    alone = shutil.copy(torch_device.BUILD / "src" / "liboxytorch-backend-hpu.so", tmp_path)
    code = f"""
import ctypes
told = ctypes.c_char_p()
entry = ctypes.CDLL({str(alone)!r}).oxy_backend_entry
entry.restype = ctypes.POINTER(ctypes.c_void_p)
score = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(entry(1)[4])
found = score(ctypes.addressof(told), None)
print(json.dumps([found, told.value.decode()]))
"""
    score, reason = told(tmp_path, code)
    assert score == 0
    assert "the torch half of this backend cannot be opened" in reason and "liboxytorch-hpu-torch.so" in reason


def test_the_backend_is_listed_with_its_card(tmp_path: Path) -> None:
    code = """
(entry,) = [one for one in ox.info()["backends"] if one["name"] == "hpu"]
print(json.dumps([entry, ox.backend.best(), ox.hpu.status().usable]))
"""
    entry, best, usable = told(tmp_path, code, "name=HL-225")
    assert usable and best == "hpu"
    assert entry["score"] == 80
    assert entry["reason"] == "torch has the device 'hpu'; libhlml.so sees 1 card"
    # What torch says of its device; of a torch that says nothing, the card's.
    size = 1 << (30 if hasattr(torch.accelerator, "get_memory_info") else 37)
    assert entry["devices"] == [{"name": "HL-225", "architecture": "", "torch_device": "hpu", "memory_bytes": size}]


def test_without_the_bridge_the_reason_names_it(tmp_path: Path) -> None:
    code = "print(json.dumps([one for one in ox.available_backends() if one['name'] == 'hpu']))"
    (entry,) = told(tmp_path, code, "cards=8", preamble="import json\nimport oxytorch as ox\n")
    assert entry["score"] == 0 and entry["devices"] == []
    assert "torch has no device 'hpu' in this process (import habana_frameworks.torch first)" in entry["reason"]
    assert entry["reason"].endswith("libhlml.so sees 8 cards")


def test_a_lost_card_is_not_used(tmp_path: Path) -> None:
    code = "ox.hpu.cards(); print(json.dumps([ox.hpu.status().reason, ox.backend.best()]))"
    assert told(tmp_path, code, "lost=1") == ["the Gaudi card of this process is lost", "cpu"]


def test_cards_and_counters(tmp_path: Path) -> None:
    code = """
a = torch.randn(4, 4, device="hpu") @ torch.randn(4, 4, device="hpu")
torch.ops.oxytorch_device.leave_to_cpu(["aten::erfinv"])
torch.erfinv(torch.rand(3, device="hpu"))
reading = ox.hpu.counters()
monitor = ox.PerformanceMonitor()
with monitor.step():
    for name, value in reading.values.items():
        monitor.scalar(name, value)
scalars = str(monitor.table())
print(json.dumps([reading.values, reading.unknown, ox.hpu.fallback_operators(), ox.hpu.cards()[0].own, scalars]))
"""
    values, unknown, operators, own, scalars = told(tmp_path, code, "power=123000", PT_HPU_ENABLE_CACHE_METRICS="1")
    assert own and unknown == {}
    assert values["recompiles"] > 0 and values["recompile_time"] == 1000 * values["recompiles"]
    assert (values["recipe_hits"], values["recipe_misses"], values["defragmentations"]) == (7, 2, 1)
    assert values["cpu_fallbacks"] == sum(operators.values()) > 0
    assert any("erfinv" in name for name in operators)
    assert values["card/power"] == 123
    assert "card/power" in scalars and "recompiles" in scalars


def test_what_is_not_collected_is_told(tmp_path: Path) -> None:
    code = "reading = ox.hpu.counters(); print(json.dumps(reading.unknown))"
    unknown = told(tmp_path, code, "cards=4")
    assert "PT_HPU_ENABLE_CACHE_METRICS=1" in unknown["recipe_hits"]
    assert unknown["card"] == "which of the 4 cards is this process's cannot be told; set HLS_MODULE_ID"
    assert "recompiles" not in unknown
    assert "card" not in told(tmp_path, code, "cards=4", HLS_MODULE_ID="2")


def test_memory_says_where_each_number_is_from(tmp_path: Path) -> None:
    code = """
held = torch.ones(1 << 20, device="hpu")
memory = ox.hpu.memory()
print(json.dumps({name: [one.value, one.source] for name, one in vars(memory).items()}))
"""
    found = told(tmp_path, code, "used=5000")
    assert found["in_use"][0] >= 4 << 20 and found["in_use"][1] == "torch.hpu.memory_stats: InUse"
    assert found["peak"][0] >= found["in_use"][0] and found["limit"][0] == 1 << 30
    assert found["card_total"] == [128 << 30, "libhlml.so: memory_total"]
    assert found["card_used"][0] == 5000
    assert found["allocations"][0] > 0


def test_fused_adamw_is_the_bridge_s_and_checkpoints_are_torch_s(tmp_path: Path) -> None:
    code = """
options = dict(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
there, here, peer = model(), model("cpu"), model()
fused = ox.hpu.FusedAdamW([{"params": list(there.parameters())}, {"params": []}], eps=1e-12, clip_norm=0.5, **options)
plain = torch.optim.AdamW(here.parameters(), eps=1e-12, **options)
for i in range(5):
    grads(there, i); grads(here, i)
    norm = torch.nn.utils.clip_grad_norm_(here.parameters(), 0.5)
    fused.step(); plain.step()
    assert abs(fused.grad_norm.item() - norm.item()) < 1e-4
apart = lambda a, b: max((p.cpu() - q.cpu()).abs().max().item() for p, q in zip(a.parameters(), b.parameters()))
assert apart(there, here) < 1e-6, apart(there, here)
assert "FusedClipNorm" in fused.explain()

# Its checkpoint goes on in torch's and in ours, and theirs in it.
saved = fused.state_dict()
assert saved["state"][0]["step"].item() == 5 and "step" not in saved["param_groups"][0]
saved["param_groups"] = saved["param_groups"][:1]
back = torch.optim.AdamW(here.parameters(), eps=1e-12, **options)
back.load_state_dict(copy.deepcopy(saved))
peer.load_state_dict(there.state_dict())
ours = ox.optim.AdamW(peer.parameters(), eps=1e-12, **options)
ours.load_state_dict(saved)
again = ox.hpu.FusedAdamW(there.parameters(), eps=1e-12, **options)
again.load_state_dict(plain.state_dict())
for i in range(5, 8):
    for module, opt in ((there, again), (here, back), (peer, ours)):
        grads(module, i); opt.step()
assert apart(there, here) < 1e-6 and apart(peer, here) < 1e-6, (apart(there, here), apart(peer, here))

# Where eps is not small the bridge's order shows: this is why it is never chosen by itself.
one, other = model(), model("cpu")
a, b = ox.hpu.FusedAdamW(one.parameters(), eps=0.1), torch.optim.AdamW(other.parameters(), eps=0.1)
grads(one, 1); grads(other, 1); a.step(); b.step()
assert apart(one, other) > 1e-5

uneven = plain.state_dict()
uneven["state"][1]["step"] = torch.tensor(3.0)
for wrong, error, words in (
    (lambda: again.load_state_dict(uneven), ValueError, "one count a group"),
    (lambda: ox.hpu.FusedAdamW(model("cpu").parameters()), NotImplementedError, "on cpu"),
    (lambda: ox.hpu.FusedAdamW(model().parameters(), lr=torch.tensor(0.1)), TypeError, "takes a number"),
    (lambda: ox.hpu.FusedAdamW(model().parameters(), clip_norm=0), ValueError, "clip_norm is 0"),
):
    try:
        wrong()
    except error as seen:
        assert words in str(seen), seen
    else:
        raise AssertionError(words)
print("done")
"""
    assert "done" in run(tmp_path, code)


def test_our_own_optimizer_and_autocast_on_the_device(tmp_path: Path) -> None:
    code = """
there, here = model(), model("cpu")
for module in (there, here):
    opt = ox.optim.AdamW(module.parameters(), lr=1e-2, clip_norm=1.0, ema_decay=0.9)
    for i in range(3):
        grads(module, i); opt.step()
assert all(torch.allclose(p.cpu(), q, atol=1e-6) for p, q in zip(there.parameters(), here.parameters()))
with ox.amp.autocast("hpu", torch.bfloat16):
    assert there(torch.randn(2, 5, device="hpu")).dtype is torch.bfloat16
assert ox.amp.recommend_dtype("hpu")[0] is torch.bfloat16
print("done")
"""
    assert "done" in run(tmp_path, code)


@pytest.mark.parametrize("lazy", ["0", "1"])
def test_lazy_mode_ends_graphs_around_each_step(tmp_path: Path, lazy: str) -> None:
    code = """
from habana_frameworks.torch import core
net = model()
with ox.hpu.mark_steps() as marks:
    for make in (torch.optim.SGD, ox.optim.SGD):
        opt = make(net.parameters(), lr=0.1)
        grads(net, 0)
        opt.step()
inside = len(core._marks)
opt.step()
ox.hpu.mark_step()
print(json.dumps([marks, ox.hpu.is_lazy(), inside, len(core._marks)]))
"""
    found = told(tmp_path, code, PT_HPU_LAZY_MODE=lazy)
    assert found == ([True, True, 4, 5] if lazy == "1" else [False, False, 0, 0])


def test_the_check_for_a_card_s_owner(tmp_path: Path) -> None:
    # Energy grows as power says: 350 W, a sample a second.
    energy = ",".join(str(5_000_000 + 350_000 * second) for second in range(120))
    printed = run(tmp_path, "", f"energy={energy}", module="oxytorch.hpu")
    assert "12 checks, 0 failed" in printed, printed
    assert printed.count("PASS") == 10 and printed.count("TELL") == 2, printed


def test_the_check_without_a_card() -> None:
    command = [sys.executable, "-m", "oxytorch.hpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "habana_frameworks.torch cannot be imported" in done.stdout
    assert "no Gaudi card is usable here: torch has no device 'hpu'" in done.stdout


def test_the_page_s_code_for_a_card(tmp_path: Path) -> None:
    blocks = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / "hpu.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert "FusedClipNorm" in run(tmp_path, "".join(blocks))


def test_the_fake_package_has_only_names_that_exist(tmp_path: Path) -> None:
    code = """
from habana_frameworks.torch import core
from habana_frameworks.torch.hpex import kernels, normalization, optimizers
import habana_dataloader
q = torch.randn(1, 2, 4, 8, device="hpu")
assert kernels.FusedSDPA.apply(q, q, q, None, 0.0, True).shape == q.shape
assert len(list(habana_dataloader.HabanaDataLoader([1, 2, 3]))) == 3
lazy_only = ("HPUGraph", "graph", "wrap_in_hpu_graph", "make_graphed_callables", "ModuleCacher")
assert not any(hasattr(torch.hpu, name) for name in lazy_only)
for module, name in ((torch.hpu, "empty_cache"), (torch.hpu, "amp"), (torch.hpu, "memory"), (core, "optim"),
                     (torch.hpu, "get_performance_counters"), (optimizers, "FusedLamb2"), (ht, "optim")):
    assert not hasattr(module, name), name
try:
    optimizers.FusedAdamW([{"params": [torch.nn.Parameter(q)]}, {"params": []}]).step()
except RuntimeError as refused:
    assert "non-empty" in str(refused)
else:
    raise AssertionError("an empty group was let through")
print("done")
"""
    assert "done" in run(tmp_path, code)
