"""Prepares a trainer: settings of the process at once, settings of the step when the first batch is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _C
from .. import optim as ox_optim
from ..amp import GradScaler, hardware_support, recommend_dtype
from ..base import parse_size, system_info
from ..optim.generators import seed_generators
from ..report import SettingLine
from ..tune.strategies.observe import Operators
from .calibrate import Bench, ChannelsLast, Escrow, Trial

if TYPE_CHECKING:
    from .trainer import Trainer

_PAYS = 0.97  # a setting is kept where it takes less than this share of the time without it
_DRIFT = 0.05  # and moves the first loss by less than this
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PATIENCE = 10.0  # seconds of one step above which nothing is measured


class Preparation:
    """What was decided for a trainer, and the lines of the report that say so."""

    def __init__(self, trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
        self._trainer = trainer
        self._s = trainer.settings
        self.lines: list[SettingLine] = []
        self._host: list[Any] = []
        self._layout: ChannelsLast | None = None
        self._decided: dict[str, Any] = {"precision": "fp32", "channels_last": False, "attention": "default"}
        self.original = optimizer
        #: What the trainer clips by itself, as the optimizer does not.
        self.separate_clip = self._s.clip_norm
        self.separate_clip_value = self._s.clip_value
        self.tail_ema = False
        self._leave_to_the_tail(getattr(optimizer, "_tail_options", None))
        self._device = next((p.device for g in optimizer.param_groups for p in g["params"]), torch.device("cpu"))
        self._seed()
        self._allocator_pending = self._s.allocator != "system"
        if not self._calibrates():
            self._apply_allocator()
        self._host_threads()
        self.optimizer = self._replace(optimizer)
        self.guard = self._nonfinite()

    # -- at once -------------------------------------------------------------------------------------------------

    def _seed(self) -> None:
        if self._s.seed is not None:
            seed_generators(self._s.seed)
        if self._s.deterministic:
            self._host_line(_C.trainer.use_deterministic_algorithms())

    def _leave_to_the_tail(self, own: dict[str, Any] | None) -> None:
        """Leave to an optimizer of oxytorch.optim what it was made to do itself."""
        if own is None:
            return
        self.separate_clip = self._s.clip_norm if own["clip_norm"] is None else None
        self.separate_clip_value = self._s.clip_value if own["clip_value"] is None else None
        self.tail_ema = own["ema_decay"] is not None

    def _host_line(self, setting: Any, gain: float | None = None) -> None:
        self._host.append(setting)
        # Another trainer of this process may have applied it.
        state = "on" if setting.is_in_effect else "refused"
        self.lines.append(SettingLine(setting.name, state, setting.reason, setting.cost, gain))

    def _apply_allocator(self) -> None:
        if not self._allocator_pending:
            if not any(line.name == "allocator" for line in self.lines):
                self.lines.insert(0, SettingLine("allocator", "off", "the system's settings were asked for."))
            return
        self._allocator_pending = False
        limit = self._s.allocator_retain_limit
        self._host_line(
            _C.trainer.tune_allocator(None if limit == "auto" else parse_size(limit, system_info()["memory"]["limit"]))
        )

    def _host_threads(self) -> None:
        if self._s.threads == "keep":
            self.lines.append(
                SettingLine("threads", "off", f"{torch.get_num_threads()} intra-op threads, as torch chose.")
            )
        else:
            wanted = None if self._s.threads == "auto" else int(self._s.threads)
            setting = _C.trainer.size_threads(wanted)
            self._host_line(setting)
            if not setting.is_applied:
                self.lines[-1].state = "off"
        if self._s.flush_denormals == "off":
            self.lines.append(SettingLine("flush_denormals", "off", "denormal numbers keep their value."))
        else:
            self._host_line(_C.trainer.flush_denormals())

    def _replace(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        replacement = self._replace_or_keep(optimizer)
        if replacement is optimizer and self._s.optimizer_state is not None:
            own = getattr(optimizer, "_tail_options", {}).get("state_dtype")
            if own != self._s.optimizer_state:
                ours = hasattr(optimizer, "tail_stats")
                why = "give the oxytorch optimizer its state_dtype" if ours else "the optimizer was not replaced"
                self.lines.append(
                    SettingLine("optimizer_state", "refused", f"the optimizer's state stays as it is; {why}.")
                )
        return replacement

    def _replace_or_keep(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        s = self._s
        if hasattr(optimizer, "tail_stats"):
            self.lines.append(SettingLine("step_tail", "on", "the optimizer is one of oxytorch.optim already."))
            return optimizer
        if s.step_tail == "off":
            self.lines.append(SettingLine("step_tail", "off", f"{type(optimizer).__name__} steps as torch does."))
            return optimizer
        try:
            replacement: torch.optim.Optimizer = ox_optim.replace(
                optimizer,
                clip_norm=s.clip_norm,
                ema_decay=s.ema_decay,
                nonfinite=s.nonfinite,
                state_dtype=s.optimizer_state,
            )
        except (TypeError, ValueError, NotImplementedError) as error:
            self.lines.append(SettingLine("step_tail", "refused", str(error)))
            return optimizer
        self.separate_clip = None
        self.tail_ema = s.ema_decay is not None
        self._share(optimizer, replacement)
        self.lines.append(
            SettingLine(
                "step_tail",
                "on",
                f"torch's {type(optimizer).__name__} was replaced by that of oxytorch.optim: clip, update and EMA "
                "are one native call. Groups and state stay shared with the old object.",
            )
        )
        if s.optimizer_state is not None:
            self.lines.append(
                SettingLine(
                    "optimizer_state",
                    "on",
                    f"the optimizer's running averages are kept as {s.optimizer_state}.",
                    "averages are rounded; see decision 6 in the documentation.",
                )
            )
        return replacement

    def _nonfinite(self) -> Any:
        """Return what looks at the gradients where the optimizer does not; None where nothing does."""
        optimizer: Any = self.optimizer
        policy = self._s.nonfinite
        if hasattr(optimizer, "tail_stats"):
            policy = optimizer._tail_options["nonfinite"]
            reason = f"{policy}: the optimizer itself looks at the gradients."
            self.lines.append(SettingLine("nonfinite", "off" if policy == "propagate" else "on", reason))
            return None
        if policy == "propagate":
            self.lines.append(SettingLine("nonfinite", "off", "a gradient that is not finite is stepped with."))
            return None
        reason = f"{policy}: the gradients are looked at before {type(optimizer).__name__} steps."
        self.lines.append(SettingLine("nonfinite", "on", reason, "their norms, and one host read a step."))
        return _C.trainer.NonFiniteGuard(policy)

    @staticmethod
    def _share(old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
        """Give both objects the same groups and state, so that schedulers and printouts of the old one hold."""
        old.param_groups = new.param_groups
        old.state = new.state

    # -- with the first batch ------------------------------------------------------------------------------------

    def _wants(self) -> dict[str, bool]:
        s = self._s
        conv = ChannelsLast.applies(self._trainer.model)
        bf16 = s.precision == "auto" and recommend_dtype(self._device)[0] is torch.bfloat16
        return {
            "precision": bf16,
            "channels_last": s.channels_last == "auto" and conv,
            "attention": s.attention == "auto",
        }

    def _calibrates(self) -> bool:
        return self._trainer.calibrate and self._device.type == "cpu" and any(self._wants().values())

    def first_step(self, batch: Any) -> None:
        """Decide what depends on the model and the batch."""
        measured = False
        if self._calibrates() and self._measurable(batch):
            measured = self._calibrate(batch)
        self._apply_allocator()
        if not measured:
            self._by_rule()
        self._make_scaler()
        self.align_state()

    def _measurable(self, batch: Any) -> bool:
        if callable(batch) and not isinstance(batch, torch.Tensor):
            return False
        if hasattr(batch, "__next__"):
            return False
        if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self._trainer._params):
            return False  # such hooks may step
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return False  # each rank might decide otherwise
        lazy = torch.nn.parameter.UninitializedParameter
        return not any(isinstance(p, lazy) for p in self._trainer.model.parameters())

    def _calibrate(self, batch: Any) -> bool:
        trainer = self._trainer
        escrow = Escrow(trainer.model, trainer._params)
        try:
            return self._compare_all(escrow, batch)
        except Exception:
            # The step itself will raise the caller's error where it belongs; here it only ends the measuring.
            self._set_precision("fp32")
            self._set_layout(False)
            self._set_attention("default")
            self.lines = [line for line in self.lines if line.name not in self._decided]
            return False
        finally:
            escrow.release()

    def _compare_all(self, escrow: Escrow, batch: Any) -> bool:
        trainer = self._trainer
        wants = self._wants()

        def run() -> torch.Tensor:
            with trainer._scope:
                return trainer.compute_loss(batch)

        bench = Bench(run, escrow)
        watch = Operators()
        escrow.rewind()
        with watch, torch.no_grad():
            run()
        first, _ = bench.once()
        if first > _PATIENCE:
            return False
        gain = None
        if self._allocator_pending:
            before = min(bench.once()[0] for _ in range(2))
            self._apply_allocator()
            bench.once()
            after = min(bench.once()[0] for _ in range(2))
            gain = before / after
            next(line for line in self.lines if line.name == "allocator").gain = gain
        if wants["precision"]:
            trial = bench.compare(lambda on: self._set_precision("bf16" if on else "fp32"))
            kept = self._keep("precision", trial, "bf16 autocast", recommend_dtype("cpu")[1])
            self._set_precision("bf16" if kept else "fp32")
        else:
            self._rule_precision()
        if wants["channels_last"]:
            trial = bench.compare(self._set_layout)
            self._set_layout(self._keep("channels_last", trial, "channels_last", "the model has convolutions."))
        else:
            self._rule_layout()
        if wants["attention"] and watch.uses("scaled_dot_product_flash_attention"):
            path = "math_bf16" if self._decided["precision"] == "bf16" else "math"
            trial = bench.compare(lambda on: self._set_attention(path if on else "default"))
            kept = self._keep("attention", trial, "the math path", "the model uses flash attention.")
            self._set_attention(path if kept else "default")
        else:
            self._rule_attention("flash attention is not used by this model.")
        return True

    def _keep(self, name: str, trial: Trial, what: str, why: str) -> bool:
        gain = 1 / trial.ratio
        took = (
            f"forward and backward take {trial.times[0] * 1e3:.3g} ms without and {trial.times[1] * 1e3:.3g} ms with it"
        )
        if trial.drift > _DRIFT:
            reason = f"{what} moved the first loss from {trial.losses[0]:.6g} to {trial.losses[1]:.6g}."
            self.lines.append(SettingLine(name, "refused", reason, gain=gain))
            return False
        kept = trial.ratio < _PAYS
        reason = f"{what}: {took} ({trial.rounds} pairs on the first batch); {why}"
        if not kept:
            reason = f"{what} does not pay here: {took} ({trial.rounds} pairs on the first batch)."
        cost = "sums and products are rounded differently." if kept else ""
        self.lines.append(SettingLine(name, "on" if kept else "refused", reason, cost, gain))
        return kept

    def _by_rule(self) -> None:
        self._rule_precision()
        self._rule_layout()
        self._rule_attention("not measured, so torch's choice stands.")

    def _rule_precision(self) -> None:
        wanted = self._s.precision
        advised, why = recommend_dtype(self._device)
        if wanted == "auto":
            on = advised is torch.bfloat16
            self._set_precision("bf16" if on else "fp32")
            line = SettingLine("precision", "on" if on else "refused", f"not measured; by the hardware: {why}")
        elif wanted == "fp32":
            self._set_precision("fp32")
            line = SettingLine("precision", "off", "float32 was asked for.")
        else:
            self._set_precision(wanted)
            native, why = hardware_support(self._device, _DTYPES[wanted])
            cost = "products are rounded to 16 bits." + ("" if native else f" Slow here: {why}")
            line = SettingLine("precision", "on", f"{wanted} autocast was asked for.", cost)
        self.lines.append(line)

    def _rule_layout(self) -> None:
        wanted = self._s.channels_last
        conv = ChannelsLast.applies(self._trainer.model)
        on = conv and wanted != "off"
        self._set_layout(on)
        if wanted == "off":
            line = SettingLine("channels_last", "off", "the model's own layout was asked for.")
        elif not conv:
            line = SettingLine("channels_last", "refused", "the model has no 2-D convolution.")
        else:
            how = "asked for" if wanted == "on" else "not measured; convolutions run best so"
            line = SettingLine("channels_last", "on", f"{how}.", "sums are rounded in another order.")
        self.lines.append(line)

    def _rule_attention(self, why: str) -> None:
        on = self._s.attention == "math"
        self._set_attention("math" if on else "default")
        if on:
            line = SettingLine("attention", "on", "the math path was asked for.", "memory grows with length squared.")
        elif self._s.attention == "default":
            line = SettingLine("attention", "off", "torch's own choice of kernel was asked for.")
        else:
            line = SettingLine("attention", "off", why)
        self.lines.append(line)

    # -- switches ------------------------------------------------------------------------------------------------

    def _set_precision(self, name: str) -> None:
        self._decided["precision"] = name
        dtype = _DTYPES.get(name)
        self._trainer._scope.autocast = None if dtype is None else torch.autocast(self._device.type, dtype=dtype)

    def _set_layout(self, on: bool) -> None:
        if on and self._layout is None:
            self._layout = ChannelsLast(self._trainer.model)
        if self._layout is not None:
            self._layout.switch(on)
        self._decided["channels_last"] = on
        self._trainer._channels_last = on

    def _set_attention(self, path: str) -> None:
        self._decided["attention"] = path
        self._trainer._scope.attention = path

    def _make_scaler(self) -> None:
        trainer = self._trainer
        fp16 = self._decided["precision"] == "fp16"
        wanted = self._s.grad_scaler == "on" or (self._s.grad_scaler == "auto" and fp16)
        if wanted and trainer.scaler is None:
            trainer.scaler = GradScaler(self._device.type)
        where = "inside the step tail" if trainer.has_tail else "by torch, with one host read a step"
        line = SettingLine("grad_scaler", "off", "only float16 needs a loss scale.")
        if wanted:
            line = SettingLine("grad_scaler", "on", f"unscale, check and skip happen {where}.")
        self.lines.append(line)

    def align_state(self) -> None:
        """Give the optimizer's tensors the strides of their parameters and drop the unused copy of the weights."""
        for p, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == p.shape and value.stride() != p.stride():
                    fresh = torch.empty_strided(p.size(), p.stride(), dtype=value.dtype, device=value.device)
                    state[key] = fresh.copy_(value)
        self._layout = None

    # -- later ---------------------------------------------------------------------------------------------------

    def after_load(self) -> None:
        """Share groups and state again: loading makes new ones."""
        if self.original is not self.optimizer:
            self._share(self.original, self.optimizer)
        self.align_state()

    def decisions(self) -> dict[str, Any]:
        """What was decided, for a resumed run to use again."""
        return dict(self._decided)

    def restore(self, decisions: dict[str, Any]) -> None:
        """Use earlier decisions instead of measuring."""
        self._apply_allocator()
        self._set_precision(decisions["precision"])
        self._set_layout(bool(decisions["channels_last"]))
        self._set_attention(decisions["attention"])
        for name in ("precision", "channels_last", "attention"):
            value = decisions[name]
            state = "off" if value in ("fp32", False, "default") else "on"
            self.lines = [line for line in self.lines if line.name != name]
            self.lines.append(SettingLine(name, state, f"{value}, as the run that is continued here had decided."))
        self.lines = [line for line in self.lines if line.name != "grad_scaler"]
        self._make_scaler()

    def revert(self) -> None:
        """Take back what was set in the process."""
        for setting in reversed(self._host):
            setting.revert()
