"""What importing costs, and that every module can be the first one a program imports."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import paraflash
from paraflash.cli import COMMANDS, main

HEAVY = ["torch", "triton", "numpy", "fastapi", "xgrammar", "matplotlib", "transformers", "tokenizers", "safetensors"]
MORE = ["torch.distributed", "uvicorn", "pydantic", "zmq", "msgspec", "prometheus_client", "httpx", "rich"]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(paraflash.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)


def loaded_after(code: str) -> tuple[set[str], float]:
    """(heavy modules in memory, seconds of processor time) of an interpreter that runs `code`."""
    report = f"""
import json, sys, time
start = time.process_time()
try:
    {code}
except SystemExit as end:
    assert not end.code, end
print(json.dumps([[m for m in {HEAVY!r} if m in sys.modules], time.process_time() - start]), file=sys.stderr)
"""
    result = python(report)
    assert result.returncode == 0, result.stderr
    found, seconds = json.loads(result.stderr.splitlines()[-1])
    return set(found), seconds


def test_importing_the_package_is_quick_and_loads_nothing_heavy() -> None:
    found, seconds = loaded_after("import paraflash; assert paraflash.__version__")
    assert not found and seconds < 2


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_loads_neither_torch_nor_triton(words: list[str]) -> None:
    found, seconds = loaded_after(f"from paraflash.cli import main; main({words!r})")
    assert not found and seconds < 2


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_loads_no_torch(command: str) -> None:
    found, _ = loaded_after(f"from paraflash.cli import main; main([{command!r}, '--help'])")
    assert not found & {"torch", "triton", "fastapi", "xgrammar", "matplotlib", "transformers"}, found


def test_the_api_names_are_there_without_being_imported() -> None:
    found, _ = loaded_after("import paraflash; from paraflash import SamplingParams; SamplingParams(temperature=0)")
    assert "torch" not in found
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = paraflash.Nothing


def test_every_module_can_be_the_first_import() -> None:
    """Third-party packages are loaded once; then each module is imported in a fork of its own."""
    names = [m.name for m in pkgutil.walk_packages(paraflash.__path__, "paraflash.")]
    code = f"""
import importlib, json, os, sys, traceback
for name in {HEAVY + MORE!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
assert not any(name.startswith("paraflash") for name in sys.modules)
failed = []
for name in {names!r}:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print(json.dumps(failed))
"""
    result = python(code, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [], result.stderr
    assert len(names) > 80


def test_ctrl_c_that_no_command_handles_gives_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paraflash.cli.importlib.import_module", interrupted)
    assert main(["serve", "folder"]) == 130
    assert capsys.readouterr().err == ""
