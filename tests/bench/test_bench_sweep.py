"""`paraflash bench sweep` with the scripted server in place of the real one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paraflash.bench.report import read_sweep, to_markdown
from paraflash.bench.server_process import ServerLost, ServerProcess, free_port
from paraflash.cli import main
from paraflash.topology import Topology, all_splits, parse_topology

FAKE = f"{sys.executable} {Path(__file__).with_name('fake_openai.py')} --port {{port}} --tp {{tp}} --pcp {{pcp}}"


def sweep_flags(out: Path, *flags: str, command: str = FAKE) -> list[str]:
    fixed = ["bench", "sweep", "some model", "--out", str(out), "--vocab-size", "1000", "--waves", "2"]
    matrix = ["--input-lens", "64", "128", "--concurrencies", "1", "2"]
    return [*fixed, *matrix, "--server-command", command, *flags]


def server_starts(out: Path) -> int:
    return sum(log.read_text().count("\n$ ") for log in (out / "logs").glob("*.log"))


def left_over(out: Path) -> list[str]:
    """Fake servers that still run: their ports are in the logs."""
    ports = [
        line.split("--port ")[1].split()[0]
        for log in (out / "logs").glob("*.log")
        for line in log.read_text().splitlines()
        if line.startswith("$ ")
    ]
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "--port" in words and words[words.index("--port") + 1] in ports and any("fake_openai" in w for w in words):
            found.append(" ".join(words))
    return found


@pytest.fixture(scope="module")
def complete(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sweep")
    assert main(sweep_flags(out, "--topologies", "tp2", "pcp2", "--output-len", "2")) == 0
    return out


def test_report_has_the_published_shape_with_changes_in_parentheses(complete):
    report = (complete / "report.md").read_text()
    assert "| Input length | Concurrency | TP2/PCP1 | TP1/PCP2 |" in report
    for key, title in (("input_throughput", "Input throughput (tok/s)"), ("mean_ttft_ms", "Mean TTFT (ms)")):
        base, other = (
            json.loads((complete / "raw" / f"{name}_128x2.json").read_text())["result"][key]
            for name in ("tp2pcp1", "tp1pcp2")
        )
        section = report.split(f"## {title}\n")[1].split("\n## ")[0]
        assert f"| 128 | 2 | {base:.2f} | {other:.2f} ({100 * (other / base - 1):+.2f} %) |" in section
    assert "## Mean TPOT (ms)" in report  # two output tokens
    assert "TP2/PCP1 | 2 | " in report and "| 4 of 4 | ok |" in report


def test_report_names_environment_and_exact_commands(complete):
    report = (complete / "report.md").read_text()
    for text in (
        "| CPU |",
        "| Python |",
        "| paraflash | 0.",
        "--port PORT --tp 2 --pcp 1",
        "--num-waves 2 --ignore-eos",
    ):
        assert text in report
    command = json.loads((complete / "raw" / "tp2pcp1_64x1.json").read_text())["command"]
    assert command in report and "--random-input-len 64 --random-output-len 2 --num-prompts 1" in command


def test_plots_are_written_and_embedded_in_the_html(complete):
    for name in ("ttft", "throughput", "scaling"):
        assert (complete / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    html = (complete / "report.html").read_text()
    assert html.count("data:image/png;base64,") == 3
    assert "<td>64</td>" in html and 'src="http' not in html


def test_waves_are_warmed_up_and_measured_with_exact_prompts(complete):
    record = json.loads((complete / "raw" / "tp2pcp1_64x2.json").read_text())
    assert record["result"]["completed"] == 4 and record["result"]["input_lens"] == [64] * 4
    assert record["result"]["server_counters"]["prompt_tokens"] == 256  # the warm-up wave is not in it


def test_a_finished_sweep_starts_no_server_again(complete):
    before = server_starts(complete)
    assert main(sweep_flags(complete, "--topologies", "tp2", "pcp2", "--output-len", "2")) == 0
    assert server_starts(complete) == before


def test_no_server_is_left(complete):
    assert left_over(complete) == []


def test_other_settings_are_refused_in_a_used_folder(complete, capsys):
    assert main(sweep_flags(complete, "--topologies", "tp2", "--output-len", "3")) == 2
    assert "holds a sweep with output_len 2, not 3" in capsys.readouterr().err


def test_a_server_killed_in_the_middle_is_in_the_report_and_the_sweep_resumes(tmp_path):
    fault = tmp_path / "fault"
    fault.touch()
    fragile = f"{FAKE} --die-at 8 --while-there-is {fault}"  # after 3 + 4 requests: in the second cell's last wave
    flags = ("--topologies", "tp2", "pcp2")
    assert main(sweep_flags(tmp_path, *flags, command=fragile)) == 1
    report = (tmp_path / "report.md").read_text()
    assert "FAILED: server killed by SIGKILL" in report
    assert "(at 64 x 2, wave 2/2)" in report and "[64 x 2, 128 x 1, 128 x 2]" in report
    row = report.split("## Input throughput (tok/s)\n")[1].split("| 64 | 2 |")[1].splitlines()[0]
    assert row.split("|")[0].strip() == "failed" and float(row.split("|")[1].split("(")[0]) > 0
    assert (tmp_path / "report.html").read_text().count("class='failed'") >= 4
    assert left_over(tmp_path) == []

    kept = (tmp_path / "raw" / "tp2pcp1_64x1.json").read_bytes()
    fault.unlink()
    assert main(sweep_flags(tmp_path, *flags, command=fragile)) == 0
    assert (tmp_path / "raw" / "tp2pcp1_64x1.json").read_bytes() == kept
    assert "FAILED" not in (tmp_path / "report.md").read_text()


def test_a_topology_that_does_not_start_is_a_row_that_says_why(tmp_path):
    command = f"{FAKE} --refuse-pcp 2"
    assert main(sweep_flags(tmp_path, "--world", "2", command=command)) == 1
    report = (tmp_path / "report.md").read_text()
    reason = "did not start: server exited with status 1: prefill_context_parallel_size is refused here"
    assert f"| TP1/PCP2 | 2 | - | 0 of 4 | FAILED: {reason}" in report
    assert "| TP2/PCP1 | 2 | " in report and "| 4 of 4 | ok |" in report


def test_a_command_that_does_not_exist_is_a_row_too(tmp_path):
    assert main(sweep_flags(tmp_path, "--topologies", "tp1", command="no-such-program-here {port}")) == 1
    assert "cannot start 'no-such-program-here'" in (tmp_path / "report.md").read_text()


def test_an_interrupted_sweep_stops_its_server_and_still_reports(tmp_path):
    flags = sweep_flags(tmp_path, "--topologies", "tp1", "pcp2", "--output-len", "1")
    process = subprocess.Popen([sys.executable, "-m", "paraflash.cli", *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "64 x 1" in line:
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130
    assert "64 | 1" in (tmp_path / "report.md").read_text()
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("own_session", [False, True])
def test_stop_ends_children_that_outlive_their_leader(tmp_path, own_session):
    sleeper = f"[sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session={own_session}"
    code = f"import subprocess, sys, os; print(subprocess.Popen({sleeper}).pid, flush=True); os._exit(3)"
    server = ServerProcess([sys.executable, "-c", code], tmp_path / "x.log", "http://127.0.0.1:1")
    server.start()
    until = time.monotonic() + 10
    while server.exit_reason() is None and time.monotonic() < until:
        time.sleep(0.02)
    child = int(server.last_line())
    os.kill(child, 0)
    server.stop()
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
                break
        except OSError:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the child still runs")


def test_a_server_that_never_gets_ready_is_given_up(tmp_path):
    import asyncio

    from paraflash.bench.client import open_client

    url = f"http://127.0.0.1:{free_port()}"
    server = ServerProcess(
        [sys.executable, "-c", "print('loading',flush=True);import time;time.sleep(60)"], tmp_path / "x.log", url
    )

    async def wait() -> None:
        async with open_client(url) as client:
            await server.wait_ready(client, 1.0)

    server.start()
    try:
        with pytest.raises(ServerLost, match="not ready after 1 s; last log line: loading"):
            asyncio.run(wait())
    finally:
        server.stop()


def test_a_pipe_in_a_reason_does_not_break_the_table(complete):
    from paraflash.bench.report import Part

    text = to_markdown([Part("t", header=["a"], rows=[["x | y\nz"]])], complete)
    assert "| x \\| y z |" in text


def test_cells_that_were_not_measured_are_no_gap_in_the_table(complete):
    sweep = read_sweep(complete)
    sweep.state["order"] = ["tp2pcp1", "tp1pcp4"]
    assert sweep.failures("tp1pcp4") == {"not run": ["64 x 1", "64 x 2", "128 x 1", "128 x 2"]}


@pytest.mark.parametrize(
    ("text", "tp", "pcp"), [("tp8", 8, 1), ("pcp2", 1, 2), ("tp4pcp2", 4, 2), ("TP4/PCP2", 4, 2), ("tp2-pcp4", 2, 4)]
)
def test_topology_names(text, tp, pcp):
    assert parse_topology(text) == Topology(tp, pcp)


@pytest.mark.parametrize("text", ["", "4", "tp", "tp0", "pcp2tp4", "tp2dp2"])
def test_bad_topology_names_are_refused(text):
    with pytest.raises(ValueError, match="topology is"):
        parse_topology(text)


def test_world_gives_every_split_from_pure_tp_on():
    assert [str(t) for t in all_splits(4)] == ["TP4/PCP1", "TP2/PCP2", "TP1/PCP4"]
    assert [str(t) for t in all_splits(6)] == ["TP6/PCP1", "TP3/PCP2", "TP2/PCP3", "TP1/PCP6"]
