"""Hang-ups, signals and the end of the engine: requests are freed at once, streams end, the process exits in time."""

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer

FOREVER = {"prompt": "SLOW FOREVER", "max_tokens": 4000}


def open_request(server: RunningServer, body: dict[str, Any]) -> socket.socket:
    """Sends a completion on a bare socket, which the test may close at any moment."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    fields = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    head = "\r\n".join(fields) + "\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(head.encode() + data)
    return connection


def read_all(connection: socket.socket) -> str:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data.decode()


def wait_running(server: RunningServer, count: int) -> None:
    deadline = time.monotonic() + 10
    while server.stat("running") != count:
        assert time.monotonic() < deadline, "the requests did not start"
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_hangs_up_frees_its_request(scripted: RunningServer, stream: bool, n: int) -> None:
    connection = open_request(scripted, {**FOREVER, "stream": stream, "n": n})
    wait_running(scripted, n)
    connection.close()
    began = time.monotonic()
    scripted.wait_idle(5)
    assert time.monotonic() - began < 2
    assert httpx.get(f"{scripted.url}/load").json() == {"server_load": 0}


def test_a_client_that_hangs_up_at_once_leaves_nothing(scripted: RunningServer) -> None:
    for _ in range(20):
        open_request(scripted, {**FOREVER, "stream": True}).close()
    time.sleep(0.3)
    scripted.wait_idle(5)


def test_others_go_on_when_one_hangs_up(scripted: RunningServer) -> None:
    connection = open_request(scripted, {**FOREVER, "stream": True})
    wait_running(scripted, 1)
    threading.Timer(0.2, connection.close).start()
    answer = httpx.post(f"{scripted.url}/v1/completions", json={"prompt": "SLOW FOREVER", "max_tokens": 30}, timeout=20)
    assert answer.json()["usage"]["completion_tokens"] == 30
    scripted.wait_idle(5)


def test_sigterm_without_requests_exits_with_0(start: Any) -> None:
    server = start()
    server.terminate()
    assert server.wait_exit() == 0


def test_sigterm_ends_open_streams_with_an_error_event(start: Any) -> None:
    server = start()
    connection = open_request(server, {**FOREVER, "stream": True})
    wait_running(server, 1)
    server.terminate()
    text = read_all(connection)
    assert '"code":503' in text
    assert "data: [DONE]" in text
    assert server.wait_exit() == 0


def test_sigterm_lets_requests_finish_within_the_timeout(start: Any) -> None:
    server = start("--shutdown-timeout", "20")
    connection = open_request(server, {"prompt": "SLOW FOREVER", "max_tokens": 40, "stream": True})
    wait_running(server, 1)
    server.terminate()
    text = read_all(connection)
    assert text.count('"finish_reason":"length"') == 1
    assert "error" not in text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert server.wait_exit() == 0


def test_a_second_signal_ends_requests_at_once(start: Any) -> None:
    server = start("--shutdown-timeout", "60")
    connection = open_request(server, {**FOREVER, "stream": True})
    wait_running(server, 1)
    server.terminate()
    time.sleep(0.3)
    server.terminate()
    assert '"code":503' in read_all(connection)
    assert server.wait_exit() == 0


def test_sigterm_while_the_engine_starts_exits_with_0(start: Any) -> None:
    server = start(factory="slow_core:SlowStart", wait=False)
    deadline = time.monotonic() + 60
    while "the engine is starting" not in server.log:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.terminate()
    assert server.wait_exit() == 0


@pytest.mark.parametrize("word", ["DIE", "RAISE"])
def test_when_the_engine_ends_every_stream_ends_and_the_server_exits(start: Any, word: str) -> None:
    server = start()
    streams = [open_request(server, {**FOREVER, "stream": True}) for _ in range(3)]
    whole = open_request(server, FOREVER)
    wait_running(server, 4)
    began = time.monotonic()
    killer = open_request(server, {"prompt": word, "stream": True})
    for connection in streams:
        text = read_all(connection)
        assert '"code":503' in text
        assert "data: [DONE]" in text
        assert ("rank 1 died in this test" in text) == (word == "RAISE")
    assert read_all(whole).startswith("HTTP/1.1 503")
    assert '"code":503' in read_all(killer)  # as an event or as a status, whichever was first
    assert server.wait_exit(10) == 1
    assert time.monotonic() - began < 10


def test_health_is_503_when_the_engine_has_ended(start: Any) -> None:
    server = start()
    statuses = []

    def watch() -> None:
        with httpx.Client(base_url=server.url) as client:
            while True:
                try:
                    statuses.append(client.get("/health").status_code)
                except httpx.HTTPError:
                    return

    watcher = threading.Thread(target=watch)
    watcher.start()
    while not statuses:
        time.sleep(0.01)
    read_all(open_request(server, {"prompt": "RAISE"}))
    watcher.join(15)
    assert set(statuses) == {200, 503}
    assert server.wait_exit(10) == 1


def test_the_engine_does_not_outlive_a_killed_server(start: Any) -> None:
    server = start()
    children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
    with open(children) as file:
        engine = int(file.read().split()[0])
    server.process.send_signal(signal.SIGKILL)
    server.process.wait(5)
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{engine}") and "zombie" not in Path(f"/proc/{engine}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_idle_engine_uses_no_processor_time(start: Any) -> None:
    server = start()
    with open(f"/proc/{server.process.pid}/task/{server.process.pid}/children") as file:
        engine = int(file.read().split()[0])

    def used() -> int:
        fields = Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # clock ticks, 100 a second

    before = used()
    time.sleep(1.5)
    assert used() - before <= 5
