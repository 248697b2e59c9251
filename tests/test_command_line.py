"""What `paraflash COMMAND --help` and a mistyped command line print."""

from __future__ import annotations

import pytest

from paraflash.arguments import CommandParser
from paraflash.cli import main


def test_help_names_each_default_once_and_none_that_says_nothing() -> None:
    parser = CommandParser(prog="x")
    parser.add_argument("--told", default=3, help="of these (default: 3)")
    parser.add_argument("--lengths", nargs="+", default=[8, 16], help="of prompts")
    parser.add_argument("--share", default="5%")
    parser.add_argument("--off", action="store_true", help="a switch")
    parser.add_argument("--on", action="store_false", help="another")
    parser.add_argument("--open", help="left open")
    parser.add_argument("--object", default={}, help="as JSON")
    for _ in range(2):
        text = " ".join(parser.format_help().split())
        assert "of these (default: 3) " in text
        assert "of prompts (default 8 16) " in text
        assert "default 5% " in text
        assert "a switch --on" in text and "another (default on)" in text
        assert "left open --object" in text and text.endswith("as JSON")


@pytest.mark.parametrize("command", ["serve", "generate", "bench offline"])
def test_a_mistyped_engine_flag_is_answered_in_two_lines(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "model", "--tensor-paralel-size", "2"])
    usage, error = capsys.readouterr().err.splitlines()
    assert usage == f"usage: paraflash {command} [-h] MODEL [flags]"
    assert error.endswith("unknown flag --tensor-paralel-size; did you mean --tensor-parallel-size?")


def test_underscores_stand_for_dashes_in_names_of_flags_alone() -> None:
    parser = CommandParser()
    parser.add_argument("--dry-run-name", nargs="+")
    assert parser.parse_args(["--dry_run_name", "a_b", "c"]).dry_run_name == ["a_b", "c"]
    assert parser.parse_args(["--dry_run_name=--a_b"]).dry_run_name == ["--a_b"]


def test_the_help_of_a_command_below_a_command_names_defaults(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-to-be-shown")
    for command, shown in (("bench serve", "of the server (default 8000)"), ("eval", "(default 1024)")):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert shown in text and "not-to-be-shown" not in text
