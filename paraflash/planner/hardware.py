"""What the cost model knows of a machine: rates, bandwidths and latencies of one GPU type, each with its source.

The released entries live in `hardware.json` beside this file; `paraflash plan --calibrate` writes further ones, in the
same form, to the user's own file. Units are FLOP/s, bytes, bytes/s and seconds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

RELEASED_FILE = Path(__file__).with_name("hardware.json")
USER_FILE = Path.home() / ".config" / "paraflash" / "hardware.json"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


class HardwareError(ValueError):
    """A hardware entry is missing or wrong; the message names the entry and the field."""


@dataclass(frozen=True)
class Hardware:
    """One GPU type as the cost model sees it.

    `link_bandwidth` is what one direction of a GPU's links carries inside a collective, `host_bandwidth` what one GPU
    reads from host memory, `launch_seconds` the host's time per kernel launch.
    """

    name: str
    bf16_flops: float  # dense
    fp8_flops: float  # dense
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    host_bandwidth: float
    collective_latency: float
    launch_seconds: float
    gpus_per_node: int
    sources: dict[str, str]  # field -> "datasheet", "measured ..." or "assumed ..."


_NUMBERS = tuple(f.name for f in fields(Hardware) if f.name not in ("name", "sources"))


def _parse(name: str, raw: Any, where: Path) -> Hardware:
    """One entry: {field: {"value": number, "source": text}}."""
    if not isinstance(raw, dict) or set(raw) != set(_NUMBERS):
        found = sorted(raw) if isinstance(raw, dict) else raw
        raise HardwareError(f"{where}: entry {name!r} has the fields {found}; exactly {', '.join(_NUMBERS)} are needed")
    values: dict[str, Any] = {}
    sources = {}
    for field in _NUMBERS:
        item = raw[field]
        value = item.get("value") if isinstance(item, dict) else None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise HardwareError(
                f"{where}: {name}.{field} is {item!r}; {{'value': a number above 0, 'source': text}} is needed"
            )
        values[field] = int(value) if field == "gpus_per_node" else float(value)
        sources[field] = str(item.get("source", "not stated"))
    return Hardware(name=name, sources=sources, **values)


def read_entries(path: Path) -> dict[str, Hardware]:
    """All entries of a hardware file by name. Raises `HardwareError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HardwareError(f"{path} does not exist; `paraflash plan --calibrate` writes it") from None
    except json.JSONDecodeError as error:
        raise HardwareError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise HardwareError(f"{path} must hold one JSON object, {{name: entry}}")
    return {name: _parse(name, raw, path) for name, raw in data.items()}


def load_hardware(name: str, user_file: Path = USER_FILE) -> Hardware:
    """The entry `name` (case ignored) of the user's file, else of the released one. Raises `HardwareError`."""
    entries = read_entries(RELEASED_FILE)
    if user_file.exists():
        entries |= read_entries(user_file)
    for known, entry in entries.items():
        if known.lower() == name.lower():
            return entry
    raise HardwareError(f"--gpu is {name!r}; known are {', '.join(entries)} (`--calibrate` adds this machine)")


def save_entry(entry: Hardware, path: Path) -> None:
    """Adds or replaces one entry of a user's hardware file."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    values = asdict(entry)
    data[entry.name] = {f: {"value": values[f], "source": entry.sources[f]} for f in _NUMBERS}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def exchange_bytes(op: str, nbytes: float, group: int) -> float:
    """Bytes that one rank sends (and receives) in a ring collective over `group` ranks.

    nbytes: all_reduce: the tensor on each rank; all_gather: the gathered output; reduce_scatter: the input of a rank.
    Raises ValueError for an unknown op or a negative size.
    """
    if op not in COLLECTIVES:
        raise ValueError(f"op is {op!r}; {', '.join(COLLECTIVES)} are modelled")
    if nbytes < 0 or group < 1:
        raise ValueError(f"nbytes is {nbytes} and group is {group}; at least 0 and 1 are needed")
    return nbytes * (group - 1) / group * (2 if op == "all_reduce" else 1)


def exchange_seconds(op: str, nbytes: float, group: int, hardware: Hardware) -> float:
    """Modelled time of one collective (sizes as in `exchange_bytes`); 0 in a group of one."""
    moved = exchange_bytes(op, nbytes, group)
    return 0.0 if group == 1 else hardware.collective_latency + moved / hardware.link_bandwidth
