"""The one table that is printed at start: topology, what each rank holds, KV capacity, kernels."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and "bytes" in name:
        return _bytes(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(
            f"{key.replace('_', ' ')} {_text(key if 'bytes' in key else name, v)}" for key, v in value.items()
        )
    if isinstance(value, list | tuple):
        return ", ".join(_text(name, v) for v in value)
    return str(value)


def rows(names: tuple[str, ...], info: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and value of each line; a list of objects gives a line each."""
    out = [("model", ", ".join(names))]
    for name, value in info.items():
        label = name.replace("_", " ")
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for i, item in enumerate(value):
                rest = {key: v for key, v in item.items() if key != "rank"}
                out.append((f"{label.removesuffix('s')} {item.get('rank', i)}", _text(name, rest)))
        else:
            out.append((label, _text(name, value)))
    return out


def print_table(names: tuple[str, ...], info: dict[str, Any]) -> None:
    table = Table(title="paraflash", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows(names, info):
        table.add_row(label, value)
    Console(stderr=True).print(table)
