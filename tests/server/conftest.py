"""Servers for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running_server import SCRIPTED, RunningServer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint with a tokenizer that knows the chat tokens."""
    from paraflash.cli import main

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    assert main(["checkpoint", "synth", str(folder), "--preset", "tiny"]) == 0
    return folder


Start = Callable[..., RunningServer]


@pytest.fixture
def start(checkpoint: Path) -> Iterator[Start]:
    """Starts servers of one test: start("--flag", factory=SCRIPTED or None for the real engine)."""
    with contextlib.ExitStack() as stack:

        def run(*arguments: str, factory: str | None = SCRIPTED, wait: bool = True) -> RunningServer:
            server = RunningServer([str(checkpoint), *arguments], factory)
            stack.callback(server.end)
            return server.wait_ready() if wait else server

        yield run


@pytest.fixture(scope="session")
def scripted(checkpoint: Path) -> Iterator[RunningServer]:
    """One server with the scripted engine, for all tests that do not end it."""
    names = ["--served-model-name", "tiny", "other-name", "--enable-log-requests"]
    server = RunningServer([str(checkpoint), *names, "--enable-prompt-tokens-details"], SCRIPTED).wait_ready()
    yield server
    server.end()
