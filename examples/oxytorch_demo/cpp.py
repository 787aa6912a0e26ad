"""`oxytorch demo --cpp`: the GPT from a C++ program that links the installed package."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import oxytorch
import torch
from oxytorch._build_info import BUILD_FOLDER
from oxytorch.bench.turns.driver import Start, WorkerFailed, race
from oxytorch.bench.turns.environment import FIRST_SEED
from oxytorch.bench.turns.times import block_seconds

from .measure import WorkloadResult, summarise
from .options import START_SECONDS, DemoOptions
from .progress import DemoProgress
from .workloads import library_text

__all__ = ["build_program", "race_cpp"]

QUICK_RUN = 500
"""Steps of the run that a quick race of the GPT tunes for."""
CONTENDERS = {"torch": "torch", "oxytorch optim": "tail", "oxytorch trainer": "trainer"}
STARTS, MOST_STEPS, LEAST_STEPS, BLOCK = 4, 48, 16, 4


def _tool(command: Sequence[str | Path], what: str) -> None:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    except FileNotFoundError:
        raise WorkerFailed(f"{what} needs {command[0]}, which is not on PATH: 'make setup' installs it") from None
    if done.returncode != 0:
        text = (done.stdout + done.stderr)[-4000:].strip()
        raise WorkerFailed(f"{what} failed with status {done.returncode}: {' '.join(map(str, command))}\n{text}")


@dataclass(frozen=True)
class Program:
    """What the figures say about the race."""

    name: str = "gpt in C++"
    title: str = "the GPT from C++: LibTorch's own AdamW loop against Oxytorch, no Python in the process"
    unit: str = "tokens"
    units_per_step: int = 16 * 128


def build_program() -> Path:
    """Install the library where it is not, build ``examples/cpp`` against it, and return the GPT program."""
    package = Path(oxytorch.__file__).resolve().parent
    root = package.parents[1]
    source = root / "examples" / "cpp"
    if not (source / "gpt.cpp").exists():
        raise WorkerFailed(f"--cpp builds examples/cpp of the source tree, and there is none at {source}")
    built = Path(BUILD_FOLDER or root / "build")
    if (package / "lib" / "cmake" / "Oxytorch").is_dir():
        prefix = package
    else:
        prefix = built / "demo-prefix"
        if not (built / "cmake_install.cmake").exists():
            raise WorkerFailed(f"--cpp installs the library from {built}, which is not built: run 'make build'")
        _tool(["cmake", "--install", built, "--prefix", prefix], "installing the library")
    build = built / "demo-cpp"
    paths = f"{prefix};{torch.utils.cmake_prefix_path}"
    _tool(
        [
            "cmake",
            "-S",
            source,
            "-B",
            build,
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_PREFIX_PATH={paths}",
        ],
        "configuring the C++ example",
    )
    _tool(["cmake", "--build", build, "--target", "example_gpt"], "building the C++ example")
    return build / "gpt"


def race_cpp(options: DemoOptions) -> WorkloadResult:
    """Race LibTorch's own loop against Oxytorch's, process by process, on the Python demo's text."""
    contenders = CONTENDERS
    with tempfile.TemporaryDirectory(prefix="oxytorch-demo-") as folder, DemoProgress() as progress:
        progress.expect("build", 40.0)
        progress.expect("train", options.seconds)
        progress.advance("build", 0.0, "building the C++ program")
        program = build_program()
        progress.finish("build")
        texts = [Path(folder) / name for name in ("train", "held")]
        for path, content in zip(texts, library_text(), strict=True):
            path.write_bytes(content)

        def commands(seed: int, steps: int) -> dict[str, list[str]]:
            shared = ["--train", str(texts[0]), "--held", str(texts[1]), "--steps", str(steps), "--seed", str(seed)]
            shared += ["--threads", str(options.threads), "--coordinator", str(os.getpid()), "--serve"]
            shared += ["--steps-planned", str(options.run_of(QUICK_RUN))]
            return {name: [str(program), "--contender", value, *shared] for name, value in contenders.items()}

        def start(seed: int, steps: int, block: int, label: str, step_seconds: float) -> Start:
            return race(
                commands(seed, steps),
                seed=seed,
                steps=steps,
                block=block,
                environment=options.environment,
                timeout=options.timeout,
                on_turn=lambda name, count: progress.advance("train", count * step_seconds, f"{label}, {name}"),
            )

        block = 2 if options.quick else BLOCK
        pace, starts, steps = 1.0, 1, 2 * block
        if not options.quick:
            # A short start tells how long the others may be.
            trial = start(1, 2 * block, block, "C++: finding the pace", 0.3)
            pace = sum(block_seconds(trial[name].blocks[-1]) for name in contenders)
            starts = STARTS
            steps = int(min(MOST_STEPS, max(LEAST_STEPS, options.seconds / starts / pace)))
            steps -= steps % block
        each = pace / len(contenders)
        progress.expect("train", starts * (steps * pace + START_SECONDS / 2))
        runs = [start(FIRST_SEED + i, steps, block, f"C++: start {i + 1} of {starts}", each) for i in range(starts)]
        progress.finish("train")
    return summarise(Program(), "", runs)
