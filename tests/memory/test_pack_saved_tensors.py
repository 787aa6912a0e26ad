"""What backward needs, packed: the bits of torch where it is lossless, a bounded error where not, and less memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oxytorch as ox
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.cpu_only("memory of CPU tensors is packed")

FORMATS = ("lossless", "bf16", "int8", "file")
EXACT = ("lossless", "file")


class Block(nn.Module):
    """Products, a norm, GELU, dropout, pooling and attention: floats, masks and indices are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.narrow(F.dropout(F.gelu(self.wide(self.norm(x))), 0.1, self.training))
        x = F.max_pool1d(x.transpose(0, 1), 2).transpose(0, 1).relu()
        return x + F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def gradients(pack: Callable[[], Any] | None, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model = Block().to(dtype)
    x = torch.randn(400, 64, dtype=dtype, requires_grad=True)
    torch.manual_seed(1)
    if pack is None:
        loss = model(x).square().sum()
    else:
        with pack():
            loss = model(x).square().sum()
    loss.backward()
    return loss.detach(), [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_gradients(format: str, dtype: torch.dtype) -> None:
    expected_loss, expected = gradients(None, dtype=dtype)
    packed = ox.memory.PackSavedTensors(format)
    loss, got = gradients(lambda: packed, dtype=dtype)
    assert loss.equal(expected_loss), "forward keeps its bits"
    bound = {"lossless": 0.0, "file": 0.0, "bf16": 0.05, "int8": 0.3}[format]  # attention scores grow errors
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        error = float((a.double() - b.double()).norm()) / float(b.double().norm())
        assert error == 0.0 if bound == 0.0 else error < bound, error
    report = packed.report()
    assert report.tensors > 0 and report.packed_bytes < report.bytes
    rounds = format == "int8" or (format == "bf16" and dtype != torch.bfloat16)
    assert report.relative_error <= {"bf16": 2.0**-8, "int8": 0.02}.get(format, 0.0)
    assert report.relative_error > 0 or not rounds
    assert (report.file_bytes > 0) == (format == "file") and "saved tensors of" in report.text()
    if rounds:
        assert any(not a.equal(b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("format", "share"), [("bf16", 0.52), ("int8", 0.27), ("file", 0.01)])
def test_memory_is_what_the_format_says(format: str, share: float) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)))

    def kept(pack: Any) -> int:
        x = torch.randn(2000, 256)
        with ox.memory.Meter() as meter:
            if pack is None:
                loss = layers(x).sum()
            else:
                with pack:
                    loss = layers(x).sum()
            live = meter.live_bytes
            loss.backward()
        for p in layers.parameters():
            p.grad = None
        return int(live)

    each = 2000 * 256 * 4
    assert kept(None) == pytest.approx(6 * each, rel=0.01)  # each linear layer saves what the tanh before it saved
    assert kept(ox.memory.PackSavedTensors(format)) == pytest.approx(6 * each * share, rel=0.05, abs=each * 0.1)


def test_masks_and_indices_are_packed_without_loss() -> None:
    x = torch.randn(100, 1000, requires_grad=True)
    mask = torch.rand(100, 1000) < 0.5
    index = torch.randint(1000, (100, 5000))
    with ox.memory.PackSavedTensors() as packed:
        loss = torch.where(mask, x, 0.0).sum() + x.gather(1, index).sum() + F.dropout(x, 0.3).sum()
    report = packed.report()
    # Bits of the mask and of dropout's float32, and 16 bits of each index.
    assert report.bytes == 100_000 + 500_000 * 8 + 100_000 * 4
    assert report.packed_bytes == 12_500 + 500_000 * 2 + 12_500
    del mask, index
    loss.backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("place", [1, 5_000, 99_999])
def test_a_third_value_is_seen_wherever_it_is(place: int) -> None:
    mask = torch.zeros(100_000, dtype=torch.uint8)
    mask[::3] = 7
    x = torch.randn(100_000, requires_grad=True)
    for third, packed_bytes in ((0, 12_500), (9, 0)):
        mask[place] = third
        with ox.memory.PackSavedTensors(least=100_000) as packed:
            loss = (x * mask).sum()
        assert packed.report().packed_bytes == packed_bytes
        (grad,) = torch.autograd.grad(loss, x)
        assert grad.equal(mask.float())


@pytest.mark.parametrize("low", [-128, -129, -40_000, -(2**31), -(2**31) - 1])
@pytest.mark.parametrize("high", [127, 128, 40_000, 2**31 - 1, 2**31])
def test_whole_numbers_come_back(low: int, high: int) -> None:
    """Through the values that autograd hands to backward."""
    numbers = torch.tensor([low, high, 0, 1] * 2000)
    seen: list[Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, given: Tensor) -> Tensor:
            ctx.save_for_backward(given)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            seen.append(ctx.saved_tensors[0])
            return grad, None

    with ox.memory.PackSavedTensors() as packed:
        out = Keeps.apply(torch.ones(1, requires_grad=True), numbers.clone())
    out.backward()
    assert seen[0].equal(numbers) and seen[0].dtype == numbers.dtype
    assert (packed.report().tensors == 1) == (low >= -(2**31) and high < 2**31)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("layout", ["dense", "transposed", "channels_last", "slices", "expanded"])
def test_layouts_come_back(format: str, layout: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16, 20, 20, requires_grad=True)

    def through(t: Tensor) -> Tensor:
        made = t.sin()
        if layout == "transposed":
            made = made.transpose(1, 3)
        if layout == "channels_last":
            made = made.contiguous(memory_format=torch.channels_last)
        if layout == "slices":
            parts = made.chunk(4, 1)
            return (parts[0] * parts[1]).sum() + (parts[2] * parts[3]).exp().sum()
        if layout == "expanded":
            made = made[:, :1].expand(4, 16, 20, 20)
        return (made * made.cos()).sum()

    (expected,) = torch.autograd.grad(through(x), x)
    with ox.memory.PackSavedTensors(format):
        loss = through(x)
    (got,) = torch.autograd.grad(loss, x)
    assert got.equal(expected) if format in EXACT else float((got - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_left_as_it_is(format: str) -> None:
    weight = torch.randn(200, 200, requires_grad=True)
    x = torch.randn(200, 200)
    with ox.memory.PackSavedTensors(format) as packed:
        F.linear(x, weight).sum()
        with torch.autocast("cpu", torch.bfloat16):
            F.linear(x, weight).sum()
        (x @ weight.t()).sum()
        torch.sin(torch.randn(10, requires_grad=True).exp()).sum()  # small
    assert packed.report().tensors == 0
    poisoned = torch.randn(200, 200, requires_grad=True)
    with ox.memory.PackSavedTensors(format) as packed:
        loss = torch.sin(poisoned / 0).sum()
    loss.backward()
    assert packed.report().tensors == (1 if format == "file" else 0), "what is not finite is not rounded"
    with torch.no_grad(), ox.memory.PackSavedTensors(format) as packed:
        torch.sin(weight.exp())
    assert packed.report().tensors == 0
    with ox.memory.PackSavedTensors(format):
        assert torch.func.grad(lambda t: t.sin().square().sum())(weight).shape == weight.shape


@pytest.mark.parametrize("format", FORMATS)
def test_graphs_as_torch_has_them(format: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 100, requires_grad=True)
    packed = ox.memory.PackSavedTensors(format)

    def loss_of() -> Tensor:
        return (x.sin() * x.exp().tanh()).sum()

    (expected,) = torch.autograd.grad(loss_of(), x)
    with packed:
        loss = loss_of()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert first.equal(second)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
        loss.backward()
    with packed:
        loss = loss_of()
        (of_x,) = torch.autograd.grad(loss, x, create_graph=True)
    (twice,) = torch.autograd.grad(of_x.sum(), x)
    assert twice.shape == x.shape and torch.isfinite(twice).all()
    with packed:
        loss = checkpoint(loss_of, use_reentrant=False) + ox.memory.checkpoint(loss_of)
    (of_two,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(of_two, 2 * expected, rtol=0.05, atol=0.05)
    with packed, packed:
        nested = loss_of()
    assert torch.autograd.grad(nested, x)[0].equal(first)
    if format in EXACT:
        assert first.equal(expected)


@pytest.mark.parametrize("format", FORMATS)
def test_a_packed_tensor_has_its_value_of_then(format: str) -> None:
    x = torch.randn(100, 100, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    with ox.memory.PackSavedTensors(format):
        made = x.exp()
        loss = made.sin().sum()
    with torch.no_grad():
        made.zero_()
    if format == "lossless":  # left as it is
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()
        return
    loss.backward()
    assert float((x.grad - expected).norm() / expected.norm()) < 0.1


def test_memory_that_is_still_there_is_taken_as_it_is() -> None:
    x = torch.randn(100, 100, requires_grad=True)
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    with ox.memory.PackSavedTensors("int8"):
        made = x.exp()
        loss = made.sin().sum()
    loss.backward()  # `made` lives
    assert x.grad.equal(expected)


@pytest.mark.parametrize("format", FORMATS)
def test_threads(format: str) -> None:
    expected = gradients(None)[1]
    packed = ox.memory.PackSavedTensors(format)
    off: list[float] = []

    def run() -> None:
        torch.manual_seed(2)
        x = torch.randn(200, 100, requires_grad=True)
        for _ in range(20):
            (right,) = torch.autograd.grad(x.sin().tanh().sum(), x)
            with packed:
                loss = x.sin().tanh().sum()
            (got,) = torch.autograd.grad(loss, x)
            off.append(float((got - right).norm() / right.norm()))

    running = [threading.Thread(target=run) for _ in range(4)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert len(off) == 80 and max(off) < 0.03
    assert gradients(None)[1][0].equal(expected[0]), "nothing stays behind"


def files() -> list[int]:
    """Sizes of the files without a name that this process has open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]  # not that of this listing
    return [link.stat().st_size for link in links if "oxytorch-saved" in str(link.readlink())]


def test_the_file_empties_and_goes(tmp_path: Path) -> None:
    packed = ox.memory.PackSavedTensors("file", tmp_path)
    assert files() == [0] and not list(tmp_path.iterdir())
    for _ in range(3):
        x = torch.randn(100, 1000, requires_grad=True)
        with packed:
            loss = x.exp().sin().tanh().sum()
        assert files()[0] >= 800_000
        loss.backward()
        del loss
        assert files() == [0]
    with packed:
        loss = x.exp().sin().sum()
    del packed
    gc.collect()
    loss.backward()  # the graph has it
    del loss
    assert files() == []


def test_what_is_read_back_is_its_holders(tmp_path: Path) -> None:
    packed = ox.memory.PackSavedTensors("file", tmp_path)
    x = torch.randn(100, 1000, requires_grad=True)
    with packed:
        made, again = (x * 2).sin(), x.exp()  # an input that nothing else holds
    right, node = (x * 2).detach(), made.grad_fn
    held = node._saved_self.detach()
    assert held.equal(right) and held.data_ptr() == node._saved_self.data_ptr(), "as long as somebody holds it"
    del made
    again.sum().backward()
    del node, again
    gc.collect()
    assert files()[0] > 0 and held.equal(right), "the file is not emptied below a reader"
    with packed:
        loss = x.exp().sin().sum()
    held.zero_()
    expected = torch.autograd.grad(x.exp().sin().sum(), x)
    assert torch.autograd.grad(loss, x)[0].equal(expected[0]), "what a holder writes stays out of the file"
    del held, loss
    gc.collect()
    assert files() == [0]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'fp8', expected 'lossless', 'bf16', 'int8' or 'file'"):
        ox.memory.PackSavedTensors("fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="writes no file"):
        ox.memory.PackSavedTensors("bf16", tmp_path)
    with pytest.raises(OSError, match=r"No such file or directory\. Name a folder"):
        ox.memory.PackSavedTensors("file", tmp_path / "none")


def test_small_tensors_stay_where_asked() -> None:
    x = torch.randn(64, 256, requires_grad=True)  # 64 KiB
    for least, packs in ((16 << 10, True), (1 << 20, False)):
        with ox.memory.PackSavedTensors("file", least=least) as packed:
            loss = (x * 2).square().sum()
        loss.backward()
        assert (packed.report().tensors > 0) is packs
    with pytest.raises(ValueError, match="least is -1, expected a number of bytes, 0 or more"):
        ox.memory.PackSavedTensors(least=-1)


def test_who_else_keeps() -> None:
    packed = ox.memory.PackSavedTensors()
    with pytest.raises(RuntimeError, match="has not entered it"):
        packed.__exit__(None, None, None)
    assert not packed.others_keep()
    with packed:
        assert packed.others_keep()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert packed.others_keep()
    assert not packed.others_keep()


def test_a_full_disk_ends_forward_in_words(tmp_path: Path) -> None:
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    x = torch.randn(100, 1000, requires_grad=True)
    packed = ox.memory.PackSavedTensors("file", tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(Exception, match="could not be written to a file in"), packed:
            x.exp().sin().sum()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    with packed:
        loss = x.exp().sin().sum()
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    loss.backward()
    assert x.grad.equal(expected)


# -- the strategies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["saved_bf16", "saved_in_file"])
def test_they_are_tried_with_the_goal_memory(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(4000, 64), torch.randint(4, (4000,)))

    def plan_for(goal: str) -> Any:
        plan = ox.accelerate(
            model, optimizer, nn.CrossEntropyLoss(), [batch], strategies=[name], goal=goal,
            max_slowdown=100.0 if goal == "memory" else None, remember=False, tune_seconds=3,
        )  # fmt: skip
        plan.revert()
        return plan.certificate

    speed = plan_for("speed")
    assert all(entry.status == "skipped" for entry in speed.entries)
    memory = plan_for("memory")
    (entry,) = memory.entries
    assert entry.status == "accepted", entry.reason
    assert memory.tuned_peak_bytes < 0.8 * memory.given_peak_bytes
