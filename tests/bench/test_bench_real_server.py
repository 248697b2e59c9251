"""The measuring commands against paraflash's own server, on the CPU with a tiny checkpoint."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paraflash.bench.client import open_client
from paraflash.bench.server_process import ServerProcess, free_port
from paraflash.cli import main

MODEL = Path(__file__).parents[1] / "data" / "golden" / "narrow"


@pytest.fixture(scope="module")
def real_url(tmp_path_factory) -> Iterator[str]:
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "paraflash.cli", "serve", str(MODEL), "--device", "cpu", "--port", str(port)]
    server = ServerProcess(command, tmp_path_factory.mktemp("server") / "log", url)

    async def ready() -> None:
        async with open_client(url) as client:
            await server.wait_ready(client, 120)

    server.start()
    try:
        asyncio.run(ready())
        yield url
    finally:
        server.stop()


def test_bench_serve_agrees_with_the_servers_own_counters(real_url, tmp_path, capsys):
    flags = ["--random-input-len", "50", "--random-output-len", "6", "--num-prompts", "4", "--num-waves", "2"]
    flags += ["--num-warmups", "1", "--ignore-eos", "--disable-tqdm", "--save-result"]
    flags += ["--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert main(["bench", "serve", "--base-url", real_url, *flags]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["input_lens"] == [50] * 8 and result["output_lens"] == [6] * 8
    assert result["server_counters"]["prompt_tokens"] == 400
    assert result["server_counters"]["generation_tokens"] == 48
    assert all(len(gaps) == 5 for gaps in result["itls"])
    assert "WARNING" not in capsys.readouterr().out


def test_a_server_equals_itself(real_url, capsys):
    flags = ["--num-prompts", "2", "--input-len", "20", "--max-tokens", "8", "--ignore-eos"]
    assert main(["compare", real_url, real_url, *flags]) == 0
    assert "Tokens before the first difference: 16" in capsys.readouterr().out


def test_eval_asks_the_completions_endpoint(real_url, tmp_path, capsys):
    path = tmp_path / "g.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "#### 4"}\n')
    flags = ["--endpoint", "completions", "--num-shots", "0", "--max-tokens", "4"]
    assert main(["eval", str(path), "--url", f"tp1={real_url}", *flags]) == 0
    assert "| tp1 | " in capsys.readouterr().out
