"""The report of a sweep from its folder: the published tables' shape, plots, environment and exact commands.

`build` turns the raw files into a list of `Part`s once; Markdown and HTML are two renderings of that list.
"""

from __future__ import annotations

import base64
import html
import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from paraflash.bench.plots import draw_plots
from paraflash.topology import parse_topology

# title, key of the result, whether it needs more than one output token
TABLES = (
    ("Input throughput (tok/s)", "input_throughput", False),
    ("Mean TTFT (ms)", "mean_ttft_ms", False),
    ("P99 TTFT (ms)", "p99_ttft_ms", False),
    ("Output throughput (tok/s)", "output_throughput", True),
    ("Mean TPOT (ms)", "mean_tpot_ms", True),
)


@dataclass
class Part:
    title: str | None = None
    text: str | None = None
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    image: Path | None = None
    code: str | None = None


@dataclass
class Sweep:
    """A sweep's folder, read. `cells` holds every record by (topology, input length, concurrency)."""

    state: dict[str, Any]
    cells: dict[tuple[str, int, int], dict[str, Any]]

    @property
    def names(self) -> list[str]:
        return list(self.state["order"])

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [(n, c) for n in self.state["input_lens"] for c in self.state["concurrencies"]]

    def value(self, name: str, shape: tuple[int, int], key: str) -> float | None:
        record = self.cells.get((name, *shape))
        return float(record["result"][key]) if record and record["status"] == "ok" else None

    def reason(self, name: str, shape: tuple[int, int]) -> str:
        record = self.cells.get((name, *shape))
        return str(record["reason"]) if record else "not run"

    def failures(self, name: str) -> dict[str, list[str]]:
        """Why cells of a topology have no value: reason to the labels of its cells."""
        found: dict[str, list[str]] = {}
        for shape in self.shapes:
            if self.value(name, shape, "duration") is None:
                found.setdefault(self.reason(name, shape), []).append(f"{shape[0]} x {shape[1]}")
        return found


def title_of(name: str) -> str:
    return str(parse_topology(name))


def read_sweep(out: Path) -> Sweep:
    state = json.loads((out / "sweep.json").read_text("utf-8"))
    records = [json.loads(path.read_text("utf-8")) for path in sorted((out / "raw").glob("*.json"))]
    return Sweep(state, {(r["topology"], r["input_len"], r["concurrency"]): r for r in records})


def _value_table(sweep: Sweep, title: str, key: str) -> Part:
    """Rows are input length x concurrency, columns topologies; the change is relative to the first topology."""
    base = sweep.names[0]
    part = Part(title, header=["Input length", "Concurrency", *map(title_of, sweep.names)])
    for shape in sweep.shapes:
        row = [str(shape[0]), str(shape[1])]
        reference = sweep.value(base, shape, key)
        for name in sweep.names:
            value = sweep.value(name, shape, key)
            if value is None:
                row.append("failed" if (name, *shape) in sweep.cells else "not run")
            elif name == base or not reference:
                row.append(f"{value:.2f}")
            else:
                row.append(f"{value:.2f} ({100 * (value / reference - 1):+.2f} %)")
        part.rows.append(row)
    return part


def _topology_table(sweep: Sweep) -> Part:
    part = Part("Topologies", header=["Topology", "Ranks", "Ready after (s)", "Cells measured", "Result"])
    for name in sweep.names:
        state, topology = sweep.state["topologies"].get(name, {}), parse_topology(name)
        measured = sum(sweep.value(name, shape, "duration") is not None for shape in sweep.shapes)
        problems = [f"{reason} [{', '.join(cells)}]" for reason, cells in sweep.failures(name).items()]
        ready = state.get("ready_seconds")
        part.rows.append(
            [
                str(topology),
                str(topology.world),
                "-" if ready is None else f"{ready:.1f}",
                f"{measured} of {len(sweep.shapes)}",
                "ok" if not problems else "FAILED: " + "; ".join(problems),
            ]
        )
    return part


def _spread(sweep: Sweep) -> str | None:
    """How much the waves of a cell differ, so that a reader can tell a change from noise."""
    spreads = []
    for record in sweep.cells.values():
        durations = record["result"]["wave_durations"] if record["status"] == "ok" else []
        if len(durations) > 1:
            spreads.append(100 * pstdev(durations) / mean(durations))
    if not spreads:
        return None
    return (
        "Standard deviation of a cell's wave durations relative to their mean: "
        f"{mean(spreads):.1f} % on average, {max(spreads):.1f} % in the worst cell."
    )


def _commands(sweep: Sweep) -> str:
    lines = []
    for name in sweep.names:
        if state := sweep.state["topologies"].get(name):
            lines.append(f"# {title_of(name)}\n{state['command']}")
    shown: dict[str, None] = {}
    for shape in sweep.shapes:
        for name in sweep.names:
            record = sweep.cells.get((name, *shape))
            if record and record.get("command"):
                shown[record["command"]] = None  # the same for every topology
    return "\n".join([*lines, "", "# each cell, against a server as above", *shown])


def build(sweep: Sweep, plots: list[tuple[str, Path]]) -> list[Part]:
    settings = sweep.state["settings"]
    intro = (
        f"Model `{settings['model']}`. A wave is as many requests as the concurrency, sent together, of random token "
        f"ids with exactly the given input length and {settings['output_len']} output token(s); each cell has "
        f"{settings['warmup_waves']} warm-up and {settings['waves']} measured wave(s). Values are over all measured "
        f"waves; changes in parentheses are relative to {title_of(sweep.names[0])}."
    )
    parts = [Part(sweep.state["title"], intro), _topology_table(sweep)]
    several = settings["output_len"] > 1
    parts += [_value_table(sweep, title, key) for title, key, long in TABLES if several or not long]
    if spread := _spread(sweep):
        parts.append(Part(text=spread))
    parts += [Part(title, image=path) for title, path in plots]
    environment = [[name, value] for name, value in sweep.state["environment"].items()]
    parts.append(Part("Environment", header=["", ""], rows=environment))
    parts.append(Part("Commands", code=_commands(sweep)))
    parts.append(Part(text="Raw results: `raw/`, one JSON file a cell; servers' output: `logs/`."))
    return parts


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def to_markdown(parts: list[Part], out: Path) -> str:
    blocks = []
    for i, part in enumerate(parts):
        if part.title:
            blocks.append(f"{'#' if i == 0 else '##'} {part.title}")
        if part.text:
            blocks.append(part.text)
        if part.header:
            lines = [part.header, ["---"] * len(part.header), *part.rows]
            blocks.append("\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines))
        if part.image:
            blocks.append(f"![{part.title}]({part.image.relative_to(out).as_posix()})")
        if part.code:
            blocks.append(f"```\n{part.code}\n```")
    return "\n\n".join(blocks) + "\n"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #1f2328; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { border: 1px solid #d0d7de; padding: 4px 10px; text-align: right; font-variant-numeric: tabular-nums; }
th { background: #f6f8fa; }
td.text { text-align: left; }
td.failed { color: #b42318; text-align: left; }
pre { background: #f6f8fa; padding: 1em; overflow-x: auto; font-size: 13px; }
img { max-width: 100%; }
"""


def _html_cell(text: str) -> str:
    numeric = text[:1].isdigit() and (text.replace(".", "").isdigit() or text.endswith("%)"))
    kind = "failed" if text.lower().startswith(("failed", "not run")) else "" if numeric else "text"
    return f"<td{f' class={kind!r}' if kind else ''}>{_inline(text)}</td>"


def _inline(text: str) -> str:
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def to_html(parts: list[Part]) -> str:
    """One file that needs no other: plots are embedded."""
    body = []
    for i, part in enumerate(parts):
        if part.title:
            level = "h1" if i == 0 else "h2"
            body.append(f"<{level}>{html.escape(part.title)}</{level}>")
        if part.text:
            body.append(f"<p>{_inline(part.text)}</p>")
        if part.header:
            head = "".join(f"<th>{html.escape(name)}</th>" for name in part.header) if any(part.header) else ""
            rows = "".join(f"<tr>{''.join(map(_html_cell, row))}</tr>\n" for row in part.rows)
            body.append(f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>")
        if part.image:
            data = base64.b64encode(part.image.read_bytes()).decode()
            body.append(f'<img alt="{html.escape(part.title or "")}" src="data:image/png;base64,{data}">')
        if part.code:
            body.append(f"<pre>{html.escape(part.code)}</pre>")
    title = html.escape(parts[0].title or "")
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def write_report(out: Path) -> int:
    """Writes report.md, report.html and plots/ into a sweep's folder; returns how many cells have no value."""
    sweep = read_sweep(out)
    parts = build(sweep, draw_plots(sweep, out / "plots"))
    (out / "report.md").write_text(to_markdown(parts, out), encoding="utf-8")
    (out / "report.html").write_text(to_html(parts), encoding="utf-8")
    return sum(sweep.value(name, shape, "duration") is None for name in sweep.names for shape in sweep.shapes)
