"""Flags of `paraflash serve`: the launch command of the vLLM guide, refusals with a reason, and spelling mistakes."""

import argparse
import shutil
from pathlib import Path
from typing import Any

import pytest
from running_server import SCRIPTED, RunningServer

from paraflash.arguments import CommandParser
from paraflash.config.engine import Refused
from paraflash.engine.flags import engine_config
from paraflash.server.cli import FIXED, add_arguments, api_keys, check_fixed


def parse(*words: str) -> argparse.Namespace:
    parser = CommandParser()
    add_arguments(parser)
    return parser.parse_args(["folder", *words])


def test_the_defaults_are_safe() -> None:
    args = parse()
    assert (args.host, args.port, args.max_body_bytes, args.metrics_prefix) == (
        "127.0.0.1",
        8000,
        32 * 2**20,
        "paraflash",
    )
    assert args.shutdown_timeout == 0


def test_underscores_are_as_good_as_dashes() -> None:
    args = parse("--max_model_len", "32k", "--served_model_name=a_b", "--no_enable_prefix_caching")
    assert (engine_config(args).max_model_len, args.served_model_name) == (32_000, ["a_b"])
    assert not engine_config(args).enable_prefix_caching


@pytest.mark.parametrize(
    ("word", "meant"), [("--max-nun-seqs=3", "--max-num-seqs"), ("--hots", "--host"), ("--api_kye=x", "--api-key")]
)
def test_a_misspelt_flag_names_the_closest_one(word: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(word)
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("--port", "70000"),
        ("--port", "x"),
        ("--max-body-bytes", "0"),
        ("--shutdown-timeout", "nan"),
        ("--override-generation-config", "["),
    ],
)
def test_a_bad_value_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("--tool-call-parser", "deepseek_v41"),
        ("--reasoning-parser", "deepseek_v4"),
        ("--enable-auto-tool-choice",),
        ("--stream-interval", "1"),
        ("--disable-log-requests",),
    ],
)
def test_flags_that_say_what_is_so_anyway_are_accepted(words: tuple[str, ...]) -> None:
    args = parse(*words)
    check_fixed({name: value for name, value in vars(args).items() if name in FIXED})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--tool-call-parser", "hermes"), "deepseek-recipe"),
        (("--chat-template", "x.jinja"), "deepseek-recipe"),
        (("--stream-interval", "8"), "use 1"),
        (("--no-enable-auto-tool-choice",), "leave it out"),
    ],
)
def test_flags_that_ask_for_something_else_are_refused(words: tuple[str, ...], reason: str) -> None:
    args = parse(*words)
    with pytest.raises(Refused, match=reason):
        check_fixed({name: value for name, value in vars(args).items() if name in FIXED})


def test_keys_come_from_the_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARAFLASH_API_KEY", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    assert api_keys(parse()) == ("from-env",)
    assert api_keys(parse("--api-key", "a", "b")) == ("a", "b")
    with pytest.raises(Refused, match="empty"):
        api_keys(parse("--api-key", ""))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--seed", "666"), "seed is 666"),  # the engine refuses
        (("--default-chat-template-kwargs", '{"x": 1}'), "default_chat_template_kwargs"),
        (("--override-generation-config", '{"temperature": -1}'), "generation config: temperature is -1"),
        (("--tokenizer", "/nowhere"), "tokenizer.json does not exist"),
        (("--host", "203.0.113.1"), "cannot listen on 203.0.113.1"),
        (("--generation-config", "/nowhere"), "/nowhere/generation_config.json cannot be read"),
        (("--ssl-keyfile", "/nowhere"), "without --ssl-certfile"),
        (("--ssl-certfile", "/nowhere"), "--ssl-certfile /nowhere and --ssl-keyfile None cannot be used"),
    ],
)
def test_a_refused_setting_ends_with_one_sentence(start: Any, words: tuple[str, ...], text: str) -> None:
    server = start(*words, factory=SCRIPTED, wait=False)
    assert server.wait_exit(30) == 2
    assert text in server.log.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("model-00002-of-00004.safetensors", "short"),
    ],
)
def test_a_broken_file_of_the_checkpoint_ends_with_one_sentence(
    checkpoint: Path, tmp_path: Path, name: str, text: str
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "broken")
    (folder / name).write_text(text)
    server = RunningServer([str(folder)], None)
    assert server.wait_exit(60) == 2
    assert name in server.log.splitlines()[-1] and "Traceback" not in server.log


def test_a_model_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    server = RunningServer([str(tmp_path / "model")], SCRIPTED)
    assert server.wait_exit(30) == 2
    assert "model/config.json does not exist" in server.log.splitlines()[-1]
