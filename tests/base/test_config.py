from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path

import numpy as np
import oxytorch as ox
import pytest
import torch
import yaml
from oxytorch import PerformanceConfig
from oxytorch.config import _KEYS


def test_levels_and_overrides() -> None:
    assert PerformanceConfig().level == "advanced"
    config = PerformanceConfig("basic", clip_norm=1, precision="bf16", channels_last=True, schedule=None, threads=2)
    assert config.level == "basic"
    assert config.clip_norm == 1.0
    assert isinstance(config.clip_norm, float)
    assert config.precision == "bf16"
    assert config.channels_last == "on"
    assert config.schedule == "none"
    assert config.threads == 2
    assert config.step_tail == "off"
    assert PerformanceConfig(level="ultra").nonfinite == "skip"


def test_attributes_are_settings() -> None:
    config = PerformanceConfig()
    config.ema_decay = 0.999
    config.memory_limit = "1.5 GiB"
    assert config.to_dict()["ema_decay"] == 0.999
    assert config.memory_limit == "1.5GiB"
    config.reset("ema_decay")
    assert config.ema_decay == 0
    assert "ema_decay" in dir(config)
    assert dict(config) == config.to_dict()


def test_annotations_are_the_table() -> None:
    source = Path(ox.config.__file__).read_text()
    block = source.split("if TYPE_CHECKING:\n        level: str")[1].split("def __init__")[0]
    names = ["level", *[line.split(":")[0].strip() for line in block.splitlines() if ": " in line]]
    assert tuple(names) == _KEYS


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("preicsion", "bf16", ValueError, "did you mean 'precision'"),
        ("precision", "bf61", ValueError, "Did you mean 'bf16'"),
        ("clip_norm", -1, ValueError, "a number >= 0, not -1"),
        ("clip_norm", float("nan"), ValueError, "not NaN"),
        ("clip_norm", "1", TypeError, "not '1'"),
        ("clip_norm", True, TypeError, "not true"),
        ("clip_norm", np.True_, TypeError, "not true"),
        ("clip_norm", [1.0], TypeError, "not a list"),
        ("clip_norm", object(), TypeError, "not a object"),
        ("seed", 2**70, ValueError, "whole number"),
        ("seed", -(2**70), ValueError, "whole number"),
        ("monitor", 1, TypeError, "true or false, not 1"),
        ("memory_limit", "10 gigs", ValueError, "unknown unit 'gigs'"),
        ("memory_limit", "110%", ValueError, "over 100%"),
        ("memory_limit", "off", ValueError, "off"),
        ("gradient_checkpointing", "of", ValueError, "of"),
        ("gradient_checkpointing", -1, ValueError, "a size such as .* or 'off'"),
        ("threads", 0, ValueError, "not 0"),
    ],
)
def test_refusals(key: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PerformanceConfig(**{key: value})
    with pytest.raises(error, match=message):
        PerformanceConfig.from_dict({key: value})


GUIDE = {
    "compile_model": True,
    "training": {"mixed_precision": "bf16", "gradient_accumulation_steps": 4, "early_stopping": {"patience": 3}},
    "hardware": {"cpu": {"num_threads": 2}},
}


def test_the_words_and_sections_of_guides(tmp_path: Path) -> None:
    config = PerformanceConfig(**GUIDE)
    assert (config.compile, config.precision, config.accumulation_steps) == ("default", "bf16", 4)
    assert (config.early_stopping_patience, config.threads) == (3, 2)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(GUIDE))
    (tmp_path / "run.json").write_text(json.dumps(GUIDE))
    for given in (GUIDE, tmp_path / "run.yaml", tmp_path / "run.json"):
        assert PerformanceConfig.of(given) == config  # type: ignore[arg-type]
    assert PerformanceConfig.of("basic", **GUIDE).threads == 2
    config.compile_model = False  # type: ignore[attr-defined]
    assert config.compile == config.compile_model == "off"  # type: ignore[attr-defined]
    assert "compile_model" not in config.to_dict()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ox.Trainer(model, optimizer, torch.nn.MSELoss(), {"level": "basic", "max_grad_norm": 2}, calibrate=False)
    assert trainer.settings.clip_norm == 2
    trainer.revert()


def test_no_refusal_waits_for_a_module_that_exists() -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    for path in sorted((source / "base").glob("config*.cpp")):
        said = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text()))
        there = [name for name in re.findall(r"later module, (\w+)", said) if (source / name).is_dir()]
        assert not there, f"{path.name} says that these come later: {there}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"batch_size": "auto"},
            r"batch_size = 'auto' \(caller\): .*oxytorch\.memory\.largest_batch\(\).*batch_curve\(\)",
        ),
        ({"data": {"shuffle": True}}, r"shuffle = true \(caller\): .*oxytorch.data.Loader"),
        ({"max_gpu_memory": "90%"}, r"max_gpu_memory = '90%' \(caller\): .*GPUConfig\(memory_fraction='90%'\)"),
    ],
)
def test_words_without_effect_yet_are_refused_by_name(given: dict[str, object], message: str, tmp_path: Path) -> None:
    for take in (PerformanceConfig.of, lambda config: PerformanceConfig(**config), PerformanceConfig.from_dict):
        with pytest.raises(NotImplementedError, match=message):
            take(given)  # type: ignore[arg-type]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(given))
    with pytest.raises(NotImplementedError, match=message.replace("caller", f"file {path}")):
        PerformanceConfig.from_file(path)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"gradient_chekpointing": True}, ValueError, "did you mean 'gradient_checkpointing'"),
        ({"training": {"max_grad_nrom": 1}}, ValueError, "did you mean 'max_grad_norm'"),
        ({"trianing": {"clip_norm": 1}}, ValueError, "unknown section 'trianing'.*did you mean 'training'"),
        ({"clip_norm": 1, "training": {"max_grad_norm": 1}}, ValueError, "twice, also as 'clip_norm'"),
        ({"training": {}}, TypeError, "empty mapping"),
        ({"clip_norm": {"value": 1}}, TypeError, "'clip_norm' is a mapping"),
        ({"mixed_precision": "bf61"}, ValueError, "Did you mean 'bf16'"),
        ({3: 4}, TypeError, "have names"),
    ],
)
def test_nothing_in_a_mapping_is_ignored(given: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PerformanceConfig.from_dict(given)


def test_the_page_lists_the_words() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "base.md").read_text()
    table = page.split("| word | setting |")[1].split("\n\n")[0]
    rows = {key: words for words, key in re.findall(r"^\| (`[^|]*) \| `(\w+)`", table, re.MULTILINE)}
    for word, key in ox._C.base.PerformanceConfig.words():
        assert not key or f"`{word}`" in rows[key], f"docs/base.md lacks {word}"


def test_wrong_attributes_are_attribute_errors() -> None:
    config = PerformanceConfig()
    with pytest.raises(AttributeError, match="did you mean 'precision'"):
        _ = config.precison
    with pytest.raises(AttributeError, match="did you mean 'threads'"):
        config.thread = 2
    assert not hasattr(config, "__array__")


def test_numbers_of_other_libraries() -> None:
    config = PerformanceConfig(
        clip_norm=np.float32(0.5), threads=np.int64(3), monitor=np.False_, warmup_steps=torch.tensor(7), min_lr_ratio=0
    )
    assert (config.clip_norm, config.threads, config.monitor, config.warmup_steps) == (0.5, 3, False, 7)
    config.ema_decay = torch.tensor(0.25)
    assert config.ema_decay == 0.25


def test_text_and_files(tmp_path: Path) -> None:
    config = PerformanceConfig("basic", clip_norm=0.1, memory_limit="90%", early_stopping_min_delta=1e-5, seed=2**62)
    assert json.loads(config.to_json()) == config.to_dict()
    assert yaml.safe_load(config.to_yaml()) == config.to_dict()
    for name in ("a.json", "b.yaml", "c.yml"):
        path = tmp_path / name
        config.save(path)
        assert PerformanceConfig.from_file(path) == config
        assert PerformanceConfig.from_file(str(path)) == config
        assert PerformanceConfig.of(path) == PerformanceConfig.of(str(path)) == config
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.json", "b.yaml", "c.yml"]
    # What PyYAML writes, booleans for on and off included, is understood.
    dumped = yaml.safe_dump({"channels_last": True, "compile": False, "clip_norm": 1e-5, "precision": "bf16"})
    assert PerformanceConfig.from_yaml(dumped).to_dict()["channels_last"] == "on"
    assert PerformanceConfig.from_yaml(dumped).clip_norm == 1e-5


def test_file_failures(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        PerformanceConfig.from_file(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match=r"\.json, \.yaml or \.yml"):
        PerformanceConfig.from_file(tmp_path / "none.toml")
    with pytest.raises(FileNotFoundError, match=r"cannot write .*a\.json.*check that its folder exists"):
        PerformanceConfig().save(tmp_path / "no" / "a.json")
    (tmp_path / "bad.yaml").write_text("precison: bf16\n")
    with pytest.raises(ValueError, match=r"bad\.yaml.*did you mean 'precision'"):
        PerformanceConfig.from_file(tmp_path / "bad.yaml")


def test_equality_copy_and_pickle(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("level: basic\nclip_norm: 2\n")
    config = PerformanceConfig.from_file(path)
    config.threads = 3
    for twin in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.copy()):
        assert twin == config
        assert twin.explain() == config.explain()
        twin.threads = 4
        assert config.threads == 3
        assert twin != config
    assert config != PerformanceConfig("basic")
    assert config != "basic"
    assert PerformanceConfig("ultra") != PerformanceConfig("advanced")
    with pytest.raises(TypeError, match="unhashable"):
        hash(config)


def test_repr_evaluates_to_the_same() -> None:
    config = PerformanceConfig("basic", clip_norm=0.5, precision="bf16")
    assert repr(config) == "PerformanceConfig('basic', precision='bf16', clip_norm=0.5)"
    assert eval(repr(config)) == config


def test_of_takes_what_users_pass() -> None:
    base = PerformanceConfig("basic", threads=2)
    assert PerformanceConfig.of(base) == base
    assert PerformanceConfig.of(base) is not base
    assert PerformanceConfig.of(base, threads=3).threads == 3
    assert base.threads == 2
    assert PerformanceConfig.of("basic").level == "basic"
    assert PerformanceConfig.of({"threads": 2, "level": "basic"}) == base
    with pytest.raises(ValueError, match="Did you mean 'advanced'"):
        PerformanceConfig.of("advanced ")
    with pytest.raises(TypeError, match="not int"):
        PerformanceConfig.of(3)  # type: ignore[arg-type]


def test_explain_names_origin_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"ema_decay": 0.9}')
    config = PerformanceConfig.from_file(path)
    config.set("seed", 1)
    lines = {line.split()[0]: line for line in config.explain().splitlines()}
    assert set(lines) == set(_KEYS)
    assert f"file {path}" in lines["ema_decay"]
    assert "caller" in lines["seed"]
    assert "level advanced" in lines["precision"]
    assert "bf16" in lines["precision"]
    assert config.origin("ema_decay") == f"file {path}"


def test_the_page_lists_the_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "base.md").read_text()
    for key in _KEYS:
        row = ox._C.base.PerformanceConfig.describe(key)
        allowed = row["allowed"].replace("'", "`")
        ends = [f"{v:g}" if isinstance(v, float) else str(v).lower() for v in (row["basic"], row["advanced"])]
        assert f"| `{key}` | {allowed} | {ends[0]} | {ends[1]} |" in page, f"docs/base.md is stale for {key}"
