"""What a measurement ran on: hardware, versions, commit. Read without importing any heavy package."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "numpy", "triton", "humming-kernels", "sgl-flash-mla", "sgl-deep-gemm", "xgrammar")
_VARIABLES = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def _output(*command: str, folder: Path | None = None) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=folder, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _cpu() -> str:
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {usable} usable cores"


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except (ValueError, OSError):
        return "unknown"


def _gpus() -> str:
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if not listed:
        return "none"
    kinds: dict[str, int] = {}
    for line in listed.splitlines():
        kinds[line] = kinds.get(line, 0) + 1
    return "; ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _commit() -> str:
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():  # an installed package may lie inside some other repository
        return "unknown"
    commit = _output("git", "rev-parse", "--short=12", "HEAD", folder=folder)
    changed = _output("git", "status", "--porcelain", "--untracked-files=no", folder=folder)
    return f"{commit or 'unknown'}{' with local changes' if changed else ''}"


def describe_environment() -> dict[str, str]:
    """Label to value, in the order in which a report shows them."""
    from paraflash import __version__

    found = {
        "CPU": _cpu(),
        "Memory": _memory(),
        "GPUs": _gpus(),
        "System": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "paraflash": f"{__version__}, commit {_commit()}",
    }
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}
