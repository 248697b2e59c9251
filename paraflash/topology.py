"""TP x PCP splits and their names, as a sweep and the planner take and print them: `tp8`, `tp4pcp2`, `pcp2`."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    tp: int
    pcp: int

    @property
    def world(self) -> int:
        return self.tp * self.pcp

    @property
    def name(self) -> str:
        return f"tp{self.tp}pcp{self.pcp}"

    def __str__(self) -> str:
        return f"TP{self.tp}/PCP{self.pcp}"


def parse_topology(text: str) -> Topology:
    """`tp4pcp2`, `tp4/pcp2`, `tp8` (PCP 1) or `pcp2` (TP 1). Raises ValueError."""
    match = re.fullmatch(r"(?:tp(\d+))?[/_-]?(?:pcp(\d+))?", text.strip().lower())
    if not match or not any(match.groups()):
        raise ValueError(f"topology is {text!r}; something like tp8, pcp2 or tp4pcp2 is needed")
    tp, pcp = (int(group or 1) for group in match.groups())
    if tp < 1 or pcp < 1:
        raise ValueError(f"topology is {text!r}; both sizes must be at least 1")
    return Topology(tp, pcp)


def all_splits(world: int) -> list[Topology]:
    """Every TP x PCP split of `world` ranks, from pure TP to pure PCP."""
    if world < 1:
        raise ValueError(f"world is {world}; at least 1 is needed")
    return [Topology(world // pcp, pcp) for pcp in range(1, world + 1) if world % pcp == 0]
