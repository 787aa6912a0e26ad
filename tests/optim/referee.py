"""One step of every optimizer and option in plain fp64, with a running bound on what rounding may change.

The referee takes the stored values before a step (decoded where they are codes), computes the step, and compares what
was stored after it. Each operation of the fp32 evaluation adds a rounding; `Num` carries the first-order bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

# Moments by algorithm: (name, 8-bit code has a sign).
MOMENTS: dict[str, list[tuple[str, bool]]] = {
    "Adam": [("exp_avg", True), ("exp_avg_sq", False), ("max_exp_avg_sq", False)],
    "AdamW": [("exp_avg", True), ("exp_avg_sq", False), ("max_exp_avg_sq", False)],
    "SGD": [("momentum_buffer", True)],
    "Lion": [("exp_avg", True)],
    "Adagrad": [("sum", False)],
    "RMSprop": [("momentum_buffer", True), ("square_avg", False), ("grad_avg", True)],
    "Muon": [("momentum_buffer", True)],
}


class Num:
    """An fp64 value and how far a rounded evaluation of it may be."""

    def __init__(self, value: Tensor, error: Tensor | float = 0.0, u: float = 2.0**-24) -> None:
        self.value = value
        self.error = torch.as_tensor(error, dtype=torch.float64, device=value.device).expand_as(value)
        self.u = u

    def constant(self, number: float) -> Num:
        """`number`, which the evaluation rounds to its type."""
        return Num(self.value.new_tensor(number, dtype=torch.float64), abs(number) * self.u, self.u)

    def _wide(self, other: Num | float) -> Num:
        return other if isinstance(other, Num) else self.constant(float(other))

    def _rounded(self, value: Tensor, error: Tensor) -> Num:
        # The last term: numbers below the normal range. An unknown value times 0 is unknown.
        return Num(
            value, (error + self.u * value.abs() + 2.0**-149).nan_to_num(nan=torch.inf, posinf=torch.inf), self.u
        )

    def __add__(self, other: Num | float) -> Num:
        other = self._wide(other)
        return self._rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Num | float) -> Num:
        other = self._wide(other)
        return self._rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Num | float) -> Num:
        other = self._wide(other)
        error = self.value.abs() * other.error + other.value.abs() * self.error + self.error * other.error
        return self._rounded(self.value * other.value, error)

    __rmul__ = __mul__

    def __truediv__(self, other: Num | float) -> Num:
        other = self._wide(other)
        quotient = self.value / other.value
        least = (other.value.abs() - other.error).clamp_min(0)
        error = (self.error + quotient.abs() * other.error) / least
        # 0 / 0 and anything over a denominator that may be 0: every result is right.
        unknown = quotient.isnan() | error.isnan()
        return self._rounded(quotient.nan_to_num(0.0), torch.where(unknown, torch.inf, error))

    def sqrt(self) -> Num:
        """Square root."""
        root = self.value.clamp_min(0).sqrt()
        top = (self.value + self.error).clamp_min(0).sqrt()
        bottom = (self.value - self.error).clamp_min(0).sqrt()
        return self._rounded(root, torch.maximum(top - root, root - bottom))

    def sign(self) -> Num:
        """Sign; unknown where rounding may have changed it."""
        unknown = (self.error >= self.value.abs()) & (self.error > 2.0**-140)
        return Num(self.value.sign(), torch.where(unknown, 2.0, 0.0), self.u)

    def clamp(self, low: float, high: float) -> Num:
        """Limited to [low, high]."""
        return Num(
            self.value.clamp(low, high), self.error + self.u * max(abs(low), 0.0 if high > 1e300 else high), self.u
        )

    def maximum(self, other: Num) -> Num:
        """The larger of the two."""
        return Num(torch.maximum(self.value, other.value), torch.maximum(self.error, other.error), self.u)

    def lerp(self, to: Num, weight: float) -> Num:
        """Self + weight (to - self)."""
        return self + (to - self) * weight


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as pairs."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def unit_norms(values: Tensor, dims: int) -> Tensor:
    """Norm of each row, or of the whole for vectors; as timm's unitwise norm. `dims` of the parameter."""
    if dims < 2:
        return values.norm()
    return values.flatten(1).norm(dim=1).reshape(-1, *[1] * (values.dim() - 1))


# ---- formats


def in_memory_order(tensor: Tensor) -> Tensor:
    """Elements of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def power_of_2(exponent: Tensor) -> Tensor:
    """2^exponent, fp64."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent.to(torch.int64))


def curve(a: Tensor, parts: int) -> Tensor:
    """The piecewise linear root of codec.h: half (2) or a quarter (4) of the piecewise linear logarithm."""
    mantissa, exponent = torch.frexp(a)
    log = ((exponent.double() - 1) + (2 * mantissa - 1)) / parts
    whole = log.floor()
    return torch.where(a == 0, 0.0, power_of_2(whole) * (1 + (log - whole)))


def inverse_curve(y: Tensor, parts: int) -> Tensor:
    """What `curve` maps to y."""
    mantissa, exponent = torch.frexp(y)
    log = ((exponent.double() - 1) + (2 * mantissa - 1)) * parts
    whole = log.floor()
    return torch.where(y == 0, 0.0, power_of_2(whole) * (1 + (log - whole)))


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """8-bit state as fp64, by the words of codec.h."""
    flat = in_memory_order(codes).double()
    a = inverse_curve(flat.abs() / (127 if signed else 255), 2 if signed else 4)
    scale = scales.double().repeat_interleave(32)[: flat.numel()]
    result = torch.empty_like(codes, dtype=torch.float64)
    in_memory_order(result).copy_(flat.sign() * a * scale)
    return result


def check_codes(codes: Tensor, scales: Tensor, want: Num, signed: bool, stochastic: bool) -> None:
    """Every code is that of some value within the bound, to nearest or to a neighbour."""

    def ordered(values: Tensor) -> Tensor:
        return in_memory_order(torch.empty_like(codes, dtype=torch.float64).copy_(values))

    value, error = ordered(want.value), ordered(want.error)
    flat = in_memory_order(codes).double()
    top, parts = (127.0, 2) if signed else (255.0, 4)
    if flat.numel() == 0:
        return
    pad = (0, -flat.numel() % 32)
    largest = torch.nn.functional.pad(value.abs(), pad).view(-1, 32).amax(1)
    slack = torch.nn.functional.pad(error, pad).view(-1, 32).amax(1)
    wide = scales.double()
    # A group that overflowed has no scale; nothing can be said of its codes.
    lost = wide.isnan() & ~(largest + slack).isfinite()
    known = ~lost.repeat_interleave(32)[: flat.numel()]
    assert (wide[largest + slack < 2.0**-120] == 0).all(), "a scale is not 0"
    normal = (largest - slack > 2.0**-119) & ~lost
    assert ((largest - slack)[normal] <= wide[normal] * (1 + 1e-6)).all(), "a scale is too small"
    assert (wide[normal] <= (largest + slack)[normal] * (1 + 2.0**-7)).all(), "a scale is too large"
    scale = scales.double().repeat_interleave(32)[: flat.numel()]
    magnitude = value.abs()
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    low = top * curve(((magnitude - error).clamp_min(0) * inverse * (1 - 1e-6)).clamp_max(1), parts)
    high = top * curve(((magnitude + error) * inverse * (1 + 1e-6)).clamp_max(1), parts)
    half = 1.0 if stochastic else 0.5
    high = high.nan_to_num(top) + half + 1e-2
    if not signed:
        high = high.clamp_min(1)
    assert (flat.abs() >= low - half - 1e-2)[known].all(), "a code is too small"
    assert (flat.abs() <= high)[known].all(), "a code is too large"
    wrong = (flat * value < 0) & (magnitude > error) & (scale > 0)
    assert not wrong[known].any(), "a code has the wrong sign"


DIGITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10, torch.float64: 52}


def ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance from |value| to the next number of `dtype`, in fp64."""
    least = {torch.float16: -14, torch.float64: -1022}.get(dtype, -126)
    exponent = (torch.frexp(value.abs().double()).exponent - 1).clamp_min(least)
    return power_of_2(exponent - DIGITS[dtype])


def check_stored(stored: Tensor, want: Num, stochastic: bool, what: str) -> None:
    """A floating-point tensor holds the value, rounded once to its dtype."""
    if stored.numel() == 0:
        return
    now = stored.detach().double()
    away = (now - want.value).abs() - want.error
    # inf is the rounding of what lies half a place or more beyond the largest number.
    largest = torch.tensor(torch.finfo(stored.dtype).max, dtype=torch.float64)
    limit = largest if stochastic else largest + 0.5 * ulp(largest, stored.dtype)
    overflow = now.isinf() & (now.sign() == want.value.sign()) & (want.value.abs() + want.error >= limit)
    away = torch.where(overflow, 0.0, away)
    narrow = stored.dtype in (torch.bfloat16, torch.float16)
    allowed = (1.0 if stochastic else 0.5) * 1.0001 if narrow else 0.5
    size = torch.maximum(want.value.abs() + want.error.nan_to_num(posinf=0.0), now.nan_to_num().abs())
    worst = float((away / ulp(size, stored.dtype)).nan_to_num(nan=-1.0).max())
    assert worst <= allowed, f"{what}: {worst} ulp of {stored.dtype} beyond the bound"
    assert not (now.isnan() & want.error.isfinite()).any(), f"{what}: NaN"


def join(weight: Tensor, low_bits: Tensor) -> Tensor:
    """bf16 weight and low bits as fp64."""
    bits = weight.view(torch.int16).to(torch.int64) & 0xFFFF
    magnitude = (((bits & 0x7FFF) << 8) + low_bits.to(torch.int64)) << 8
    return magnitude.to(torch.int32).view(torch.float32).double() * torch.where(bits >= 0x8000, -1.0, 1.0)


# ---- one step


@dataclass
class Before:
    """What a parameter's step starts from, in fp64."""

    weight: Tensor
    moments: dict[str, Tensor]
    errors: dict[str, Tensor]
    step: float
    ema: Tensor | None


def weights_of(param: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The weights at their best precision, fp64."""
    if "master" in state:
        return state["master"].double()
    if "low_bits" in state:
        return join(param.detach(), state["low_bits"])
    return real(param.detach()).double()


def moments_of(name: str, state: dict[str, Any]) -> dict[str, Tensor]:
    """The moments that a state holds, fp64."""
    found = {}
    for key, signed in MOMENTS[name]:
        if state.get(key) is None:
            continue
        scale = state.get(f"{key}_scale")
        found[key] = real(state[key]).double().clone() if scale is None else decode(state[key], scale, signed)
    return found


def params_of(opt: Any) -> list[Tensor]:
    """All parameters in order."""
    return [p for group in opt.param_groups for p in group["params"]]


def snapshot(opt: Any) -> list[Before]:
    """State before a step."""
    opt.tail_stats()  # takes over state that was made or loaded
    averages = opt.ema_state_dict()["ema"]
    name = type(opt).__name__
    out = []
    for i, param in enumerate(params_of(opt)):
        state = opt.state.get(param) or {}
        ema = real(averages[i]).double().clone() if i in averages else None
        step = float(state["step"]) if state.get("step") is not None else 0.0
        moments = moments_of(name, state)
        # A code is decoded in fp32; the fourth power multiplies its rounding.
        coded = {k: moments[k].abs() * (2.0**-19 if f"{k}_scale" in state else 0.0) for k in moments}
        out.append(Before(weights_of(param, state).clone(), moments, coded, step, ema))
    return out


def rule(name: str, group: dict[str, Any], old: Before, grad: Num) -> tuple[Num, dict[str, Num]]:
    """New weights and moments of one parameter."""
    u = grad.u
    weight = Num(old.weight, 0.0, u)
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    new: dict[str, Num] = {}

    def moment(key: str, start: float = 0.0) -> Num:
        return Num(old.moments.get(key, torch.full_like(old.weight, start)), old.errors.get(key, 0.0), u)

    decoupled = name in ("AdamW", "Lion", "Muon") or group.get("decoupled_weight_decay", False)
    if decoupled:
        weight = weight - weight * (lr * decay)
    elif decay != 0:
        grad = grad + weight * decay
    if name in ("Adam", "AdamW"):
        beta1, beta2 = (float(b) for b in group["betas"])
        step = old.step + 1
        new["exp_avg"] = moment("exp_avg").lerp(grad, 1 - beta1)
        new["exp_avg_sq"] = square = moment("exp_avg_sq") * beta2 + grad * grad * (1 - beta2)
        if group["amsgrad"]:
            new["max_exp_avg_sq"] = square = moment("max_exp_avg_sq").maximum(square)
        denominator = square.sqrt() * ((1 - beta2**step) ** -0.5) + float(group["eps"])
        change = new["exp_avg"] / denominator * (lr / (1 - beta1**step))
    elif name == "SGD":
        change = grad
        if group["momentum"] != 0:
            if "momentum_buffer" in old.moments:
                kept = moment("momentum_buffer") * group["momentum"]
                new["momentum_buffer"] = kept + grad * (1 - group["dampening"])
            else:
                new["momentum_buffer"] = grad
            nesterov = grad + new["momentum_buffer"] * group["momentum"]
            change = nesterov if group["nesterov"] else new["momentum_buffer"]
        change = change * lr
    elif name == "Lion":
        beta1, beta2 = group["betas"]
        average = moment("exp_avg")
        change = average.lerp(grad, 1 - beta1).sign() * lr
        new["exp_avg"] = average.lerp(grad, 1 - beta2)
    elif name == "Adagrad":
        new["sum"] = moment("sum", group["initial_accumulator_value"]) + grad * grad
        change = grad / (new["sum"].sqrt() + group["eps"]) * (lr / (1 + old.step * group["lr_decay"]))
    elif name == "RMSprop":
        alpha = group["alpha"]
        new["square_avg"] = spread = moment("square_avg") * alpha + grad * grad * (1 - alpha)
        if group["centered"]:
            new["grad_avg"] = average = moment("grad_avg").lerp(grad, 1 - alpha)
            spread = (spread - average * average).clamp(0.0, float("inf"))
        change = grad / (spread.sqrt() + group["eps"])
        if group["momentum"] != 0:
            new["momentum_buffer"] = change = moment("momentum_buffer") * group["momentum"] + change
        change = change * lr
    else:
        new["momentum_buffer"] = buffer = moment("momentum_buffer").lerp(grad, 1 - group["momentum"])
        direction = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        rows, columns = old.weight.shape
        original = group["adjust_lr_fn"] in (None, "original")
        factor = max(1.0, rows / columns) ** 0.5 if original else 0.2 * max(rows, columns) ** 0.5
        # Newton-Schulz in bf16 is far from the exact polynomial; how far, torch's own shows.
        made = orthogonal(direction.value, group)
        steps = (tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])
        of_torch = float((_zeropower_via_newtonschulz(direction.value.float(), *steps).double() - made).abs().max())
        change = Num(made * lr * factor, (0.03 + 1.5 * of_torch) * lr * factor, u)
    return weight - change, new


def orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Newton-Schulz iteration of Muon in fp64."""
    a, b, c = group["ns_coefficients"]
    x = matrix.mT if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp_min(group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if matrix.size(0) > matrix.size(1) else x


def check_step(opt: Any, before: list[Before], grads: list[Tensor | None], scale: float = 1.0) -> None:
    """What the optimizer holds after a step that was applied is what the referee computes.

    `grads` as autograd left them; `scale` is the product of grad_scale and grad_divisor.
    """
    name, tail = type(opt).__name__, opt._tail_options
    wide = [None if g is None else real(g.detach()).double() / scale for g in grads]
    squares = sum((float((g * g).sum()) for g in wide if g is not None), 0.0)
    clip = 1.0 if tail["clip_norm"] is None else min(1.0, tail["clip_norm"] / (squares**0.5 + 1e-6))
    # Clipping is by the norm that was measured; how far that may be off is held at the end.
    off = 0.0
    if clip < 1.0 and not tail["step_in_backward"] and math.isfinite(norm := float(opt.tail_stats().grad_norm)):
        off = min(abs(norm / squares**0.5 - 1.0), 1e-6)
    averages, copies = opt.ema_state_dict()["ema"], opt.copies()
    groups = [group for group in opt.param_groups for _ in group["params"]]
    for i, (param, group, old, g) in enumerate(zip(params_of(opt), groups, before, wide, strict=True)):
        state = opt.state.get(param) or {}
        what = f"{name} parameter {i} {tuple(param.shape)} {param.dtype}"
        if g is None:
            assert torch.equal(weights_of(param, state), old.weight), f"{what} without gradient was changed"
            continue
        u = 2.0**-50 if old.weight.numel() and real(param).dtype == torch.float64 else 2.0**-24
        grad = Num(g, 0.0, u) * clip
        grad.error = grad.error + (2 * u + off) * grad.value.abs()  # the quotient of clip and scale, and its rounding
        if tail["clip_value"] is not None:
            grad = grad.clamp(-tail["clip_value"], tail["clip_value"])
        if tail["agc"] is not None:
            norm = unit_norms(grad.value, param.dim())
            most = unit_norms(old.weight, param.dim()).clamp_min(tail["agc_eps"]) * tail["agc"]
            factor = torch.where(norm > most, most / norm.clamp_min(1e-6), 1.0)
            grad = grad * Num(factor, factor * 4 * u, u)
        if group.get("maximize"):
            grad = grad * -1.0
        want, moments = rule(name, group, old, grad)
        stochastic = bool(tail["stochastic_rounding"])
        if "step" in state and name in ("Adam", "AdamW", "Adagrad", "RMSprop"):
            assert float(state["step"]) == old.step + 1, what
        for key, signed in MOMENTS[name]:
            if key not in moments:
                continue
            stored = state[key]
            if stored.dtype in (torch.int8, torch.uint8):
                check_codes(stored, state[f"{key}_scale"], moments[key], signed, stochastic)
            else:
                check_stored(real(stored), moments[key], stochastic and stored.dtype == torch.bfloat16, f"{what} {key}")
        best = weights_of(param, state)
        if "master" in state:
            check_stored(state["master"], want, False, f"{what} master")
            assert torch.equal(param, state["master"].to(param.dtype)), f"{what} is not its master rounded"
        elif "low_bits" in state:
            unit = 2.0**-15 if stochastic else 2.0**-16
            away = (best - want.value).abs() - want.error - unit * (want.value.abs() + want.error) * 1.0001
            assert (away <= 2.0**-126).all(), f"{what} low bits"
            assert ((param.double() - best).abs() <= 0.5 * ulp(best, torch.bfloat16)).all(), f"{what} is not to nearest"
        else:
            check_stored(real(param), want, stochastic and param.dtype == torch.bfloat16, what)
        if old.ema is not None or i in averages:
            decay = tail["ema_decay"]
            start = old.ema if old.ema is not None else old.weight
            average = Num(start, 0.0, u).lerp(Num(best, 0.0, u), 1 - decay)
            check_stored(real(averages[i]), average, False, f"{what} average")
        if copies[i] is not None:
            rounded = best.to(torch.float32 if u > 2.0**-30 else torch.float64).to(copies[i].dtype)
            assert torch.allclose(copies[i], rounded, rtol=0, atol=0, equal_nan=True), f"{what} copy"
    stats = opt.tail_stats()
    assert float(stats.applied) == 1
    measured = tail["nonfinite"] != "propagate" or tail["clip_norm"] is not None or tail["collect_stats"]
    if measured and not tail["step_in_backward"]:
        assert abs(float(stats.grad_norm) - squares**0.5) <= 1e-6 * squares**0.5 + 1e-30
