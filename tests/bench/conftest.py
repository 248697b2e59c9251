from collections.abc import Iterator

import fake_openai
import pytest


@pytest.fixture
def script() -> fake_openai.Script:
    return fake_openai.Script()


@pytest.fixture
def url(script: fake_openai.Script) -> Iterator[str]:
    with fake_openai.running(script) as base:
        yield base
