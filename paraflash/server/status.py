"""The status page at `/`: one HTML file that polls `/status.json`; nothing is loaded from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from paraflash import __version__
from paraflash.server.errors import first_line
from paraflash.server.logprobs import finite
from paraflash.server.startup_table import rows
from paraflash.server.state import ServerState


@cache
def page() -> str:
    return (files("paraflash.server") / "status.html").read_text(encoding="utf-8")


def snapshot(state: ServerState, now: float) -> dict[str, Any]:
    """What the page shows. `now` is in seconds since the epoch."""
    stats = state.engine.stats
    prompt_rate, output_rate = state.metrics.throughput()
    health = "dead" if state.engine.dead is not None else "draining" if state.draining else "serving"
    return {
        "version": __version__,
        "model": list(state.options.served_names),
        "health": health,
        "reason": state.engine.dead and first_line(state.engine.dead),
        "uptime_s": int(now - state.started),
        "max_model_len": state.limits.max_model_len,
        "info": plain(state.engine.info),
        "lines": rows(state.options.served_names, state.engine.info),
        "stats": plain(stats),
        "open_requests": state.engine.num_open,
        "prompt_tokens_per_s": round(prompt_rate, 1),
        "output_tokens_per_s": round(output_rate, 1),
    }


def plain(value: Any) -> Any:
    """`value` with nothing that JSON cannot hold."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    return value if value is None or isinstance(value, str | int | bool) else str(value)
