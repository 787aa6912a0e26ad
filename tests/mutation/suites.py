"""Which tests must notice a fault in a file: quick ones first, and the next only where those pass."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PATHS", "Stage", "stages_of"]

#: What is mutated unless `--paths` says otherwise.
PATHS = (
    "src/data",
    "src/generators",
    "src/optim",
    "src/kernels",
    "src/tune",
    "python/oxytorch/data",
    "python/oxytorch/generators.py",
    "python/oxytorch/optim",
    "python/oxytorch/tune",
    "python/oxytorch/trainer",
)


@dataclass(frozen=True)
class Stage:
    """Programs or pytest paths that run together, and what must be built for them.

    Attributes
    ----------
    tests : tuple of str
        Pytest paths; with `programs`, names of GoogleTest programs, with "@DEVICE" where that is not the CPU and
        ":FILTER" where not all of one runs.
    preset : str
        Of CMake, where C++ is built: "core-only" needs no torch and takes seconds. Empty for Python alone.
    programs : bool
    seconds : float
        What it may take; 0 where that is measured without a fault first.
    """

    tests: tuple[str, ...]
    preset: str = ""
    programs: bool = False
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """For tables and for the record of times."""
        return " ".join(self.tests) + (f" ({self.preset})" if self.preset else "")

    @property
    def targets(self) -> tuple[str, ...]:
        """What is built for it."""
        if not self.programs:
            return "oxytorch_python", "oxytorch_torch_device"
        return tuple(re.split("[@:]", test)[0] for test in self.tests)


def programs(preset: str, *names: str) -> Stage:
    """A stage of GoogleTest programs."""
    return Stage(names, preset, programs=True)


# Python: the files whose tests have another name than they.
_FIRST = {
    "python/oxytorch/generators.py": ("tests/generators/test_generators.py", "tests/optim/test_torch_cases.py"),
    "python/oxytorch/optim/optimizers.py": ("tests/optim/test_torch_cases.py", "tests/optim/test_bad_input.py"),
    "python/oxytorch/optim/options.py": ("tests/optim/test_bad_input.py",),
    "python/oxytorch/optim/origin.py": ("tests/optim/test_nan_origin.py",),
    "python/oxytorch/optim/replace.py": ("tests/optim/test_replace_libraries.py", "tests/optim/test_replace.py"),
    "python/oxytorch/optim/sharded.py": ("tests/optim/test_distributed.py",),
    "python/oxytorch/optim/tail.py": ("tests/optim/test_state.py", "tests/optim/test_bad_input.py"),
    "python/oxytorch/model/call.py": ("tests/tune/test_strategies.py",),
    "python/oxytorch/tune/chance.py": ("tests/tune/test_verify.py",),
    "python/oxytorch/tune/record.py": ("tests/tune/test_verify.py", "tests/tune/test_planted_faults.py"),
    "python/oxytorch/tune/compare.py": ("tests/tune/test_verify.py", "tests/tune/test_planted_faults.py"),
    "python/oxytorch/tune/ends.py": ("tests/tune/test_verify.py",),
    "python/oxytorch/tune/verify.py": ("tests/tune/test_verify.py", "tests/tune/test_planted_faults.py"),
    "python/oxytorch/tune/run.py": ("tests/tune/test_replace.py", "tests/tune/test_single_strategies.py"),
    "python/oxytorch/tune/strategy.py": ("tests/tune/test_plan.py", "tests/tune/test_strategies.py"),
    "python/oxytorch/tune/update.py": ("tests/tune/test_verify.py", "tests/tune/test_planted_faults.py"),
    "python/oxytorch/tune/watch.py": ("tests/tune/test_plan.py", "tests/tune/test_watch_random.py"),
    "python/oxytorch/tune/strategies/compiled.py": (
        "tests/trainer/test_compile_fails.py",
        "tests/tune/test_strategies.py",
    ),
    "python/oxytorch/data/sampling.py": ("tests/data/test_loader.py",),
    "python/oxytorch/data/sources.py": ("tests/data/test_loader.py",),
    "python/oxytorch/tune/strategies/feed.py": ("tests/tune/test_feed.py", "tests/tune/test_strategies.py"),
    "python/oxytorch/tune/strategies/optimizer.py": (
        "tests/tune/test_native_step.py",
        "tests/tune/test_strategies.py",
        "tests/tune/test_single_strategies.py",
    ),
    "python/oxytorch/trainer/decisions.py": ("tests/trainer/test_auto.py", "tests/trainer/test_fit.py"),
    "python/oxytorch/trainer/early_stopping.py": ("tests/trainer/test_fit.py",),
    "python/oxytorch/trainer/settings.py": ("tests/trainer/test_step.py",),
    "python/oxytorch/trainer/trainer.py": ("tests/trainer/test_step.py", "tests/trainer/test_fit.py"),
}
# C++ of the torch side: the programs whose tests are of this file.
_PLANTED = "tune_torch_test:*PlantedFaultsTest*"
_SEVERAL = "tune_torch_test:SeveralTest*"
_ON_DEVICES = ("native_device_test@sim", "native_device_test@privateuse1", "native_device_test@hpu")
_OPTIM = ("optim_test", "optimizer_edits_test", *_ON_DEVICES)
_PROGRAMS = {
    "src/optim/nonfinite": ("trainer_test",),
    "src/optim/archive": ("optim_test:*Archive*",),
    "src/optim/backward_hooks": ("optim_test:*InBackward*",),
    "src/optim/device": _ON_DEVICES,
    "src/optim/nan_origin": ("optim_test:NanOrigin*",),
    "src/optim/schedule": ("optim_test:Schedule*",),
    "src/optim/spike_detector": ("optim_test:SpikeDetector*",),
    "src/optim/stability": ("optim_test:*Stability*",),
    "src/tune/chance": (_PLANTED,),
    "src/tune/host": ("trainer_test",),
    "src/tune/kinks": ("tune_torch_test:KinksTest*", _PLANTED),
    "src/tune/measure": ("tune_torch_test:MeasureTest*", _PLANTED),
    "src/tune/native_step": ("tune_torch_test:*NativeStep*",),
    "src/tune/plan": ("tune_torch_test:AccelerateTest*", "trainer_test"),
    "src/tune/record": (_PLANTED, _SEVERAL),
    "src/tune/step_judge": ("tune_torch_test:StepJudgeTest*", _PLANTED),
    "src/tune/training_step": ("tune_torch_test:*TrainingStepTest*:EngineTest*", _SEVERAL),
    "src/tune/verify": (_PLANTED,),
    "src/tune/": ("tune_torch_test:*StrategiesTest*:*StrategyTest*", "tune_torch_test:AccelerateTest*"),
}


def _torch_free(root: Path, path: str) -> bool:
    """Whether a source of a module belongs to the library that needs no torch; a header, where its source does."""
    lists = root / "/".join(path.split("/")[:2]) / "CMakeLists.txt"
    core = " ".join(re.findall(r"oxytorch_module\(core([^)]*)\)", lists.read_text())).split()
    name = Path(path).name
    return "src/kernels/" in path or name in core or name.replace(".h", ".cpp") in core or name == "words.h"


def stages_of(root: Path, path: str) -> list[Stage]:
    """Return the stages for a file; the last is all that tests its module."""
    module = path.split("/")[-2] if path.startswith("src/kernels/device") else path.split("/")[1]
    if path.endswith(".py"):
        module = path.split("/")[2].removesuffix(".py")
        own = f"tests/{module}/test_{Path(path).stem}.py"
        default = (own,) if (root / own).exists() else ()
        if "/strategies/" in path:
            default = ("tests/tune/test_strategies.py", "tests/tune/test_single_strategies.py")
        first = _FIRST.get(path, default)
        rest = [
            file.relative_to(root).as_posix()
            for file in sorted((root / "tests" / module).glob("test_*.py"))
            if file.relative_to(root).as_posix() not in first
        ]
        return [*(Stage((test,)) for test in first), Stage(tuple(rest))]
    if path.startswith("src/kernels/device/"):
        return [
            programs("core-only", "device_tail_test"),
            *(programs("dev", name) for name in _ON_DEVICES),
            programs("dev", "optim_test"),
        ]
    if path.startswith("src/kernels/attention"):
        return [programs("dev", "ops_test"), Stage(("tests/ops",), "dev")]
    if path.startswith("src/kernels/"):
        return [
            programs("core-only", "kernels_test"),
            programs("dev", "optim_test"),
            Stage(("tests/optim/test_equivalence.py", "tests/optim/test_fuzz.py"), "dev"),
            Stage(("tests/tune/test_operators.py",), "dev"),
        ]
    if path.startswith("src/data/tensors"):
        return [programs("dev", "data_tensors_test"), Stage(("tests/data",), "dev")]
    if path.startswith("src/data/"):
        return [programs("core-only", "data_test"), Stage(("tests/data",), "dev")]
    if _torch_free(root, path):
        return [
            programs("core-only", "tune_test"),
            programs("dev", "tune_torch_test:AccelerateTest*"),
            Stage(("tests/tune/test_accelerate.py", "tests/tune/test_plan.py", "tests/tune/test_remember.py"), "dev"),
        ]
    usual = _OPTIM if module == "optim" else ("optim_test",)
    first = next((names for start, names in _PROGRAMS.items() if path.startswith(start)), usual)
    everything = _OPTIM if module == "optim" else ("tune_torch_test", "trainer_test")
    rest = tuple(name for name in everything if name not in first)
    return [
        *(programs("dev", name) for name in (*first, *rest)),
        Stage((f"tests/{module}",), "dev"),
    ]
