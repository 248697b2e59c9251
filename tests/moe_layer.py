"""One MoE layer on the ranks of a process group: its exchange started early against one that is waited for at once."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paraflash.kernels import make_kernels
from paraflash.model.moe import MoE
from paraflash.model.weights import Numerics, Weights
from paraflash.parallel import exchange
from paraflash.parallel.exchange import RowGather
from paraflash.parallel.mesh import Group, Mesh, init_mesh, use_copies

EXPERTS, TOPK = 8, 3


def make_layer(mesh: Mesh, width: int, dtype: torch.dtype) -> MoE:
    """Random weights, the same on all ranks but for the routed experts, of which each rank has a share."""
    draw = torch.Generator().manual_seed(1)
    inner, each = width // 2, EXPERTS // mesh.world

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=draw) / shape[-1] ** 0.5).to(mesh.device, dtype)

    first = mesh.rank * each
    own = slice(first, first + each)
    tensors: dict[str, Any] = {"gate": random(EXPERTS, width), "gate.bias": torch.zeros(EXPERTS, device=mesh.device)}
    for name, shape in (("w1", (inner, width)), ("w2", (width, inner)), ("w3", (inner, width))):
        tensors[f"experts.{name}"] = random(EXPERTS, *shape)[own].contiguous()
        tensors[f"shared_experts.{name}"] = random(*shape)
    model = SimpleNamespace(
        num_experts=EXPERTS, experts_per_token=TOPK, routed_scaling_factor=2.5, norm_topk_prob=True, gate_temp=1.0,
        swiglu_limit=7.0,
    )  # fmt: skip
    numerics = Numerics(dtype, trained_rounding=False, round_inputs=dtype == torch.bfloat16)
    return MoE(model, Weights(tensors), make_kernels(mesh.device, dtype), numerics, mesh, first)  # type: ignore[arg-type]


def at_once(mesh: Mesh) -> Mesh:
    """The same ranks without started collectives."""
    tp, pcp = (dataclasses.replace(g, own_stream=False, copies=None, log=[], seconds={}) for g in (mesh.tp, mesh.pcp))
    return dataclasses.replace(mesh, tp=tp, pcp=pcp)


def output(layer: MoE, h: Tensor, group: Group, counts: list[int], lag: Callable[[], None] = lambda: None) -> Tensor:
    """The layer's output [counts[rank], D]; other work takes memory and writes to it while the sum is under way. `lag`
    makes a rank late."""
    lag()
    finish, _, _ = layer.start(h, RowGather(group, counts, "experts"))
    other = [torch.full_like(h, float("nan")) for _ in range(8)]
    del other
    lag()
    return finish()


def compare(
    rank: int,
    world: int,
    device: str,
    init_method: str,
    width: int,
    cases: list[list[int]],
    capture: Callable[[torch.device], Callable[..., Any]] | None = None,
    rounds: int = 2,
    large: int = exchange.OWN_BYTES,
    copied: int = 0,
) -> None:
    """Fails where a started exchange changes a bit of the output or the log. `capture`: also compares replayed graphs;
    `copied`: exchanges of steps of so many tokens go by copy engines.

    cases: rows of each rank. A share of `large` bytes is routed where its rows are, a smaller one by all ranks.
    """
    exchange.OWN_BYTES = large
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    mesh = init_mesh(rank, 1, world, device, init_method)
    mesh.pcp.own_stream = True  # over gloo the collectives are started too, and waited for by the host
    if copied:
        use_copies(mesh, copied, width * dtype.itemsize)
        mesh.take_seconds()
        assert mesh.pcp.copies is not None and mesh.pcp.copies.holds(copied // world * width * dtype.itemsize)
    mesh.start_log()
    slow = at_once(mesh)
    late = random.Random(rank)

    def lag() -> None:
        if copied and late.random() < 0.5:
            torch.cuda._sleep(late.randrange(2_000_000))  # cycles: up to a millisecond

    layers = make_layer(mesh, width, dtype), make_layer(slow, width, dtype)
    captures = None if capture is None else capture(mesh.device)
    held: list[Any] = []  # graphs of one pool: it must not be without one in between
    with torch.inference_mode():
        for counts in cases:
            draw = torch.Generator().manual_seed(100 + rank)
            inputs = [torch.randn(counts[rank], width, generator=draw).to(mesh.device, dtype) for _ in range(rounds)]
            wanted = [output(layers[1], h, slow.pcp, counts) for h in inputs]
            found = [output(layers[0], h, mesh.pcp, counts, lag) for h in inputs]
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a, b), f"rank {rank}, {counts} rows: {(a - b).abs().max()}"
            logged = mesh.take_log()
            assert copied or logged == slow.pcp.log, f"rank {rank}, {counts} rows"
            slow.pcp.log = []
            if captures is not None:
                run = partial(_thrice, lambda h, n=counts: output(layers[0], h, mesh.pcp, n, lag))
                held.append(_compare_replayed(captures, run, inputs, wanted))
                mesh.take_log()
    assert set(mesh.pcp.seconds) == set(slow.pcp.seconds) == {"experts"}
    del captures, held
    mesh.close()


def _thrice(run: Callable[[Tensor], Tensor], h: Tensor) -> list[Tensor]:
    """Layers one behind the other: the exchange of one must not touch what the next one uses."""
    return [run(h) for _ in range(3)]


def _compare_replayed(
    capture: Callable[..., Any], run: Callable[[Tensor], list[Tensor]], inputs: list[Tensor], wanted: list[Tensor]
) -> Any:
    """Replays of one captured call for every input; returns the graph's replay."""
    h = inputs[0].clone()
    replay = capture(lambda: run(h))
    for x, expected in zip(inputs, wanted, strict=True):
        h.copy_(x)
        for out in replay():
            assert torch.equal(out, expected), f"replayed: {(out - expected).abs().max()}"
    return replay
