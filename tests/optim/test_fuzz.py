"""Random groups, shapes, layouts, dtypes and options, and random edits of state, layout, dtype and groups between the
steps, some gradients in the memory of parameters, by each way to step natively; each step against the fp64 reference.

OXYTORCH_FUZZ_CASES sets how many cases run (300 unless set; `make nightly` runs 20,000). A failing case names its
seed; OXYTORCH_FUZZ_SEED=<seed> runs that one alone. optimizer_edits_test does the same in C++.
"""

from __future__ import annotations

import os
import random
from typing import Any

import oxytorch.optim
import pytest
import torch
import torch_device
from mutations import Mutations, refused_and_back
from referee import check_step, params_of, snapshot
from ways import NATIVE_STEP, WAYS, Way

DEVICE = torch_device.chosen()

CASES = int(os.environ.get("OXYTORCH_FUZZ_CASES", "300"))
ONLY = os.environ.get("OXYTORCH_FUZZ_SEED")
CHUNK = 25
SEEDS = [[int(ONLY)]] if ONLY else [list(range(i, min(i + CHUNK, CASES))) for i in range(0, CASES, CHUNK)]

ALGORITHMS = ["AdamW", "Adam", "SGD", "Lion", "Adagrad", "RMSprop", "Muon"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
SHAPES = [(), (1,), (3,), (32,), (33,), (257,), (0,), (0, 4), (5, 7), (16, 33), (2, 3, 4, 5), (600,), (1, 40), (40, 1)]
MATRICES = [(5, 7), (16, 16), (33, 8), (1, 6), (12, 1)]


class Case:
    """A seeded choice of everything."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.way = WAYS[seed % len(WAYS)] if DEVICE.type == "cpu" else "optim"
        names = [n for n in ALGORITHMS if n != "Lion"] if self.way != "optim" else ALGORITHMS
        self.name = self.pick.choice(NATIVE_STEP if self.way == "native_step" else names)
        count = self.pick.choice([1, 1, 2, 3])
        kinds = DTYPES[:4] if self.name == "Muon" else DTYPES
        if self.way in ("native_step", "Trainer"):  # bits of torch's 16-bit operators; a loss that is a real number
            kinds = [torch.float32, torch.float64]
        main = self.pick.choices(kinds, [8, 5, 2, 1, 1][: len(kinds)])[0]
        self.dtypes = [main] if self.chance(0.8) else [main, self.pick.choice(kinds)]
        self.tail = self.tail_options()
        groups = [{"params": self.params(), **self.hyperparameters()} for _ in range(count)]
        if not any(group["params"] for group in groups):
            groups[0]["params"] = [torch.nn.Parameter(torch.ones((2, 2), dtype=main, device=DEVICE))]
        if self.way == "optim":
            self.opt = getattr(oxytorch.optim, self.name)(groups, **self.tail)
        else:
            self.tail = {"zero_grads": False}
            self.held = Way(self.way, self.name, [p for g in groups for p in g["params"]], groups)
            self.opt = self.held.opt
        # Apart from the other choices.
        self.mutations = Mutations(random.Random(~seed), self.opt, lambda: self.stepping)
        self.readings = random.Random(f"readings {seed}")

    @property
    def stepping(self) -> Any:
        return self.opt if self.way == "optim" else self.held.stepping

    @property
    def verified(self) -> Any:
        return self.opt if self.way == "optim" else self.held.verified

    def chance(self, probability: float) -> bool:
        return self.pick.random() < probability

    def values(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, generator=self.generator, dtype=wide).to(DEVICE)

    def laid_out(self, values: torch.Tensor) -> torch.Tensor:
        """The same values in another layout."""
        kind = self.pick.choice(["contiguous", "contiguous", "transposed", "channels_last", "strided", "offset"])
        if kind == "transposed" and values.dim() >= 2:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if kind == "channels_last" and values.dim() == 4:
            return values.to(memory_format=torch.channels_last)
        if kind == "strided" and values.dim() >= 1:
            room = values.new_zeros((*values.shape[:-1], 2 * values.shape[-1]))
            room[..., ::2] = values
            return room[..., ::2]
        if kind == "offset":
            room = values.new_zeros(values.numel() + 3)
            room[3:] = values.flatten()
            return room[3:].view(values.shape)
        return values

    def params(self) -> list[torch.nn.Parameter]:
        shapes = MATRICES if self.name == "Muon" else SHAPES
        chosen = [self.pick.choice(shapes) for _ in range(self.pick.choice([0, 1, 2, 3, 4]))]
        made = []
        for shape in chosen:
            dtype = self.pick.choice(self.dtypes)
            made.append(torch.nn.Parameter(self.laid_out(self.values(shape, dtype).to(dtype))))
        return made

    def tail_options(self) -> dict[str, Any]:
        tail: dict[str, Any] = {"force_composite": self.chance(0.2), "collect_stats": self.chance(0.2)}
        clip = self.pick.choice([None, None, "clip_norm", "clip_value", "agc"])
        if clip:
            tail[clip] = 10 ** self.pick.uniform(-3, 1)
        if self.chance(0.3):
            tail["ema_decay"] = self.pick.choice([0.0, 0.5, 0.99, 0.9999])
        if self.chance(0.3):
            tail["copy_dtype"] = self.pick.choice(["bf16", "fp16"])
        tail["zero_grads"] = self.chance(0.2)
        tail["nonfinite"] = self.pick.choice(["skip", "skip", "propagate"])
        if torch.complex64 not in self.dtypes:
            tail["state_dtype"] = self.pick.choice([None, None, "fp32", "bf16", "int8"])
            tail["stochastic_rounding"] = self.chance(0.3)
            tail["seed"] = self.pick.randrange(2**63)
        masters = [False, True, "int8"] if torch.float16 not in self.dtypes else [False, True]
        tail["master_weights"] = self.pick.choice(masters)
        return tail

    def hyperparameters(self) -> dict[str, Any]:
        c, p = self.chance, self.pick
        lr: Any = p.choice([0.0, 10 ** p.uniform(-6, 0)])
        g: dict[str, Any] = {"lr": lr, "weight_decay": p.choice([0.0, 10 ** p.uniform(-5, 0)])}
        if self.name != "Muon":
            g["maximize"] = c(0.2)
            g["lr"] = (
                torch.tensor(lr, device=DEVICE)
                if c(0.15) and self.name in ("Adam", "AdamW", "SGD", "Lion") and self.way == "optim"
                else lr
            )
        betas = (p.choice([0.0, 0.5, 0.9, 0.99]), p.choice([0.0, 0.9, 0.999]))
        if self.name in ("Adam", "AdamW"):
            g |= {"betas": betas, "eps": 10 ** p.uniform(-9, -2), "amsgrad": c(0.3)}
            if self.name == "Adam":
                g["decoupled_weight_decay"] = c(0.3)
        elif self.name == "Lion":
            g["betas"] = betas
        elif self.name == "SGD":
            momentum = p.choice([0.0, 0.5, 0.9])
            nesterov = momentum > 0 and c(0.3)
            dampening = 0.0 if nesterov else p.choice([0.0, 0.3])
            g |= {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}
        elif self.name == "Adagrad":
            g |= {"lr_decay": p.choice([0.0, 0.1]), "eps": 10 ** p.uniform(-10, -2)}
            g["initial_accumulator_value"] = p.choice([0.0, 0.1])
        elif self.name == "RMSprop":
            g |= {"alpha": p.choice([0.0, 0.9, 0.99]), "eps": 10 ** p.uniform(-9, -2), "centered": c(0.4)}
            g["momentum"] = p.choice([0.0, 0.9])
        else:
            g |= {"momentum": p.choice([0.5, 0.95]), "nesterov": c(0.5), "ns_steps": p.choice([0, 3, 5])}
            g["adjust_lr_fn"] = p.choice([None, "original", "match_rms_adamw"])
        return g

    def set_grads(self) -> list[torch.Tensor | None]:
        size = 10 ** self.pick.uniform(-3, 1)
        for p in params_of(self.opt):
            if self.chance(0.15):
                p.grad = None
                continue
            grad = size * self.values(tuple(p.shape), p.dtype)
            if self.chance(0.3) and grad.numel():
                grad = grad * (torch.rand(grad.shape, generator=self.generator) < 0.5).to(DEVICE)  # zeros
            p.grad = self.laid_out(grad.to(p.dtype))
        return [None if p.grad is None else p.grad.clone() for p in params_of(self.opt)]

    def read_parameters(self, grads: list[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Let gradients lie in the memory of parameters; return those that are stepped before they are read."""
        pick, params, stepped = self.readings, params_of(self.opt), {}
        if self.way == "Trainer" or self.tail["zero_grads"] or pick.random() < 0.85:
            return stepped
        tail = self.verified._tail_options
        measured = tail["nonfinite"] != "propagate" or tail["clip_norm"] is not None or tail["collect_stats"]
        for i, p in enumerate(params):
            # A norm is taken before any is stepped.
            others = [j for j, q in enumerate(params) if j > i or (j < i and not measured)]
            others = [j for j in others if params[j].shape == p.shape and params[j].dtype == p.dtype]
            if grads[i] is None or not others:
                continue
            j = pick.choice(others)
            p.grad = params[j].detach()
            grads[i] = p.grad.clone()
            if j < i:
                stepped[i] = p.grad
        return stepped

    def mutate(self, step: int) -> None:
        """Edit what the last step left."""
        if step == 0:
            return
        if self.mutations.pick.random() < 0.1 and self.way in ("optim", "replace", "step_tail"):
            refused_and_back(self.stepping.step, params_of(self.opt))
        before = len(self.mutations.done)
        self.mutations.apply()
        if self.way == "optim" and "lay_out_params" in self.mutations.done[before:]:
            # Codes of 8 bits are rounded again in their new order, which is to be known before the step.
            self.opt._adopt_restored()

    def step(self) -> None:
        if self.way == "optim":
            self.opt.step()
            return
        given = {id(p): p.grad for p in params_of(self.opt)}
        if self.way == "Trainer":  # whose backward makes them
            for p in self.held.params:
                p.grad = None
        self.held.step([given[id(p)] for p in self.held.params])

    def run(self) -> None:
        for step in range(self.pick.choice([1, 2, 3, 4])):
            self.mutate(step)
            scale = 1.0
            if self.way == "optim":
                scale = 2.0 ** self.pick.randrange(-3, 4) if self.chance(0.2) else 1.0
                self.opt.grad_divisor = scale
            for group in self.opt.param_groups:
                if self.chance(0.3) and isinstance(group["lr"], float):
                    group["lr"] *= 0.5
            grads = self.set_grads()
            if self.way == "Trainer" and all(g is None for g in grads):
                continue  # a loss without gradients
            stepped = self.read_parameters(grads)
            before = snapshot(self.verified)
            self.step()
            grads = [stepped.get(i, g) for i, g in enumerate(grads)]
            check_step(self.verified, before, grads, scale)
            if self.tail["zero_grads"]:
                assert all(p.grad is None or not p.grad.any() for p in params_of(self.opt))


@pytest.mark.parametrize("seeds", SEEDS, ids=[f"{s[0]}-{s[-1]}" for s in SEEDS])
def test_random_cases(seeds: list[int]) -> None:
    for seed in seeds:
        case = None
        try:
            case = Case(seed)
            case.run()
        except Exception as error:
            edits = "" if case is None else ", ".join(case.mutations.done)
            what = "" if case is None else f" ({case.way}: {case.name}, {case.tail}, {case.dtypes}; edits: {edits})"
            raise AssertionError(f"case {seed}{what} failed; OXYTORCH_FUZZ_SEED={seed} runs it alone") from error
