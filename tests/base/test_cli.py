from __future__ import annotations

import json

import pytest
from oxytorch import __version__, cli
from oxytorch.bench import _gate_parser


def test_info_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == __version__


def test_info_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["info", "--no-such-option"]])
def test_bad_usage_is_status_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(argv)
    assert exit_.value.code == 2
    assert "usage: oxytorch" in capsys.readouterr().err


def test_version_and_help_are_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--version"], ["--help"], ["info", "--help"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(argv)
        assert exit_.value.code == 0
    assert __version__ in capsys.readouterr().out


def test_every_command_takes_json_and_has_help() -> None:
    parser = cli.make_parser()
    commands = next(action for action in parser._actions if hasattr(action, "choices") and action.choices)
    assert set(commands.choices) >= {"info"}
    for name, command in commands.choices.items():
        assert command.get_default("run") is not None
        # What follows `bench` is passed on: to a parser of its own, or to a bundled benchmark.
        parser = _gate_parser(()) if name == "bench" else command
        assert "--json" in parser._option_string_actions
