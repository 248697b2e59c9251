from collections.abc import Iterator

import fake_openai
import pytest


@pytest.fixture(scope="session")
def _server() -> Iterator[tuple[fake_openai.Script, str]]:
    script = fake_openai.Script()
    with fake_openai.running(script) as base:
        yield script, base


@pytest.fixture
def script(_server: tuple[fake_openai.Script, str]) -> fake_openai.Script:
    """The running server's script, as new."""
    vars(_server[0]).update(vars(fake_openai.Script()))
    return _server[0]


@pytest.fixture
def url(script: fake_openai.Script, _server: tuple[fake_openai.Script, str]) -> str:
    return _server[1]
