"""What one prefill step costs a rank, term by term: FLOPs and bytes counted from the config, time by the roofline.

Each `*_term` function counts one part of the step for one rank of a TP x PCP topology and returns a `Term` with its
seconds, FLOPs and bytes. Rates come from `Hardware`; the only fitted numbers are the two of `Efficiency`. A rank has
rows / PCP of the step's rows; what TP shares out is read from the checkpoint's tensor table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from paraflash.checkpoint.tensors import Shard, shard_slices, tensor_table
from paraflash.config.model import LayerSpec, ModelConfig
from paraflash.planner.hardware import Hardware, exchange_bytes, exchange_seconds
from paraflash.planner.workload import Chunk, Step, key_counts, layer_chunks
from paraflash.topology import Topology

BF16 = 2
FP4 = 0.5 + 1 / 32  # a packed value and its share of a scale byte
HEAD_TILE = 64  # the sparse attention kernel takes 64 heads or a multiple: fewer are padded
TOPK_PASSES = 12  # measured: torch.topk takes as long as reading the logits 12 times
KERNELS_PER_LAYER = 40  # launches of a layer, in round numbers


@dataclass(frozen=True)
class Efficiency:
    """The two fitted numbers: share of the FLOP ceiling reached in the routed experts, and in other matrix work."""

    experts: float
    compute: float


@dataclass(frozen=True)
class RecordBytes:
    """Bytes of the cache records that PCP ranks exchange: a window row, a compressed latent, an index key."""

    window: int
    latent: int
    index: int


@dataclass(frozen=True)
class Setup:
    """Everything but the step: the model, where it runs, and how well."""

    model: ModelConfig
    topology: Topology
    hardware: Hardware
    efficiency: Efficiency
    records: RecordBytes


@dataclass(frozen=True)
class Term:
    """Seconds, FLOPs and bytes (memory, or the wire for a collective) of one part of a step on one rank."""

    seconds: float = 0.0
    flops: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: Term) -> Term:
        return Term(self.seconds + other.seconds, self.flops + other.flops, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class StepCost:
    """The terms of a step by name, in the order of `TERMS`."""

    terms: dict[str, Term]

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms.values())

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost({name: term + other.terms[name] for name, term in self.terms.items()})


@dataclass(frozen=True)
class Linear:
    """A dense matrix product of a rank: [rows, inputs] x [inputs, outputs], its local shape."""

    name: str
    layer: int
    outputs: int
    inputs: int


@lru_cache(maxsize=64)
def linears(model: ModelConfig, tp: int) -> tuple[tuple[Linear, ...], ...]:
    """Dense linears of TP rank 0 by layer: all matrices but the routed experts and the Engram tables.

    wo_a's [out, in] is one group's input by all groups' outputs, so rows x out x in counts its grouped product rightly.
    """
    by_layer: list[list[Linear]] = [[] for _ in model.layers]
    for spec in tensor_table(model):
        if spec.layer is None or spec.expert is not None or spec.split.kind == "engram":
            continue
        if len(spec.shape) != 2 or spec.name.endswith(("q_weight", "k_weight")):
            continue
        part = shard_slices(spec, Shard(0, tp, tp))
        if part is not None:
            by_layer[spec.layer].append(Linear(spec.name, spec.layer, *(s.stop - s.start for s in part)))
    return tuple(tuple(layer) for layer in by_layer)


def _matmul(setup: Setup, linear: Linear, rows: float) -> Term:
    """One dense product in bf16 by the roofline: weights, inputs and outputs move once."""
    flops = 2.0 * rows * linear.outputs * linear.inputs
    nbytes = BF16 * (linear.outputs * linear.inputs + rows * (linear.outputs + linear.inputs))
    rate = setup.hardware.bf16_flops * setup.efficiency.compute
    return Term(max(flops / rate, nbytes / setup.hardware.memory_bandwidth), flops, nbytes)


def _moved(setup: Setup, nbytes: float) -> Term:
    return Term(nbytes / setup.hardware.memory_bandwidth, 0.0, nbytes)


def _collective(setup: Setup, op: str, nbytes: float, group: int) -> Term:
    seconds = exchange_seconds(op, nbytes, group, setup.hardware)
    return Term(seconds, 0.0, exchange_bytes(op, nbytes, group))


def _rows(chunks: tuple[Chunk, ...]) -> int:
    return sum(length for _, length in chunks)


def _layers(setup: Setup, step: Step) -> Iterator[tuple[LayerSpec, tuple[Chunk, ...], tuple[Chunk, ...]]]:
    """(layer, chunks whose KV it writes, chunks that it runs in full)."""
    for layer in setup.model.layers:
        yield layer, *layer_chunks(setup.model, layer, step)


def gemm_term(setup: Setup, step: Step) -> Term:
    """Dense and shared-expert linears, the router, the output head.

    TP shares out wq_b, wo_a, wo_b, the shared experts and the head; wq_a, wkv, the compressors, the indexers' linears
    and the router run whole on every TP rank, on the rows of its PCP rank.
    """
    total = Term()
    dense = linears(setup.model, setup.topology.tp)
    for layer, written, full in _layers(setup, step):
        for linear in dense[layer.index]:
            if ".engram." in linear.name or ".hc_" in linear.name:
                continue  # counted in engram_term and residual_term
            writes_kv = linear.name.endswith(("attn.wkv.weight", "indexer.wk.weight")) or ".compressor." in linear.name
            rows = _rows(written if writes_kv else full) / setup.topology.pcp
            if linear.name.endswith("indexer.wk.weight"):
                rows /= layer.ratio  # one index key an entry
            total += _matmul(setup, linear, rows)
    head = Linear("head.weight", -1, -(-setup.model.vocab_size // setup.topology.tp), setup.model.hidden_size)
    return total + _matmul(setup, head, len(step.finished)) if step.finished else total


def attention_term(setup: Setup, step: Step) -> Term:
    """Sparse attention: scores and weighted sums of all (padded) heads over the chosen rows (model.md 3.10).

    A rank's heads are padded to whole tiles of 64, so splitting heads over TP saves nothing and splitting queries over
    PCP does. Bytes: every query gathers its bf16 rows, reads its padded heads and writes as many.
    """
    model, topology = setup.model, setup.topology
    local_heads = -(-model.o_groups // topology.tp) * model.heads_per_group
    heads = -(-local_heads // HEAD_TILE) * HEAD_TILE
    total = Term()
    for layer, _, full in _layers(setup, step):
        pairs = key_counts(model, layer.ratio, full)[0] / topology.pcp
        rows = _rows(full) / topology.pcp
        flops = 4.0 * pairs * heads * model.head_dim  # QK and PV, a multiply and an add each
        nbytes = BF16 * model.head_dim * (pairs + 2 * rows * heads)
        rate = setup.hardware.bf16_flops * setup.efficiency.compute
        total += Term(max(flops / rate, nbytes / setup.hardware.memory_bandwidth), flops, nbytes)
    return total


def index_term(setup: Setup, step: Step) -> Term:
    """Index scores of every visible entry in fp8 and the top-k over them (model.md 3.9); replicated over TP."""
    model = setup.model
    total = Term()
    for layer, _, full in _layers(setup, step):
        if layer.owns_index:
            pairs = key_counts(model, layer.ratio, full)[1] / setup.topology.pcp
            flops = 2.0 * pairs * model.index_heads * model.index_head_dim
            nbytes = 4.0 * pairs * (1 + TOPK_PASSES)  # fp32 scores: written once, read by the top-k
            compute = flops / (setup.hardware.fp8_flops * setup.efficiency.compute)
            total += Term(compute + nbytes / setup.hardware.memory_bandwidth, flops, nbytes)
    return total


def experts_touched(model: ModelConfig, rows: float) -> float:
    """Expected number of routed experts that at least one of `rows` tokens chooses, under even routing."""
    return model.num_experts * (1.0 - (1.0 - model.experts_per_token / model.num_experts) ** rows)


def moe_term(setup: Setup, step: Step) -> Term:
    """Routed experts of the fullest EP rank on the rows of all PCP ranks (model.md 3.13).

    EP = TP x PCP, so every split of one world runs the same work. Weights are read once for each touched expert, on
    top of the products, since unpacking FP4 does not overlap well (the sum fits measured kernels, docs/planner.md).
    Bytes also hold the permuted rows: in, gate and up out, activation in, out, combined.
    """
    model, world = setup.model, setup.topology.world
    first, end = Shard(0, 1, world).experts(model.num_experts)
    share = (end - first) / model.num_experts
    hidden, inner = model.hidden_size, model.moe_intermediate_size
    per_value = FP4 if model.quant and model.quant.fp4_experts else 1.0 if model.quant else BF16
    total = Term()
    for _, _, full in _layers(setup, step):
        rows = _rows(full)
        pairs = rows * model.experts_per_token * share
        flops = 2.0 * pairs * 3 * hidden * inner
        weights = experts_touched(model, rows) * share * 3 * hidden * inner * per_value
        nbytes = weights + BF16 * pairs * (4 * hidden + 4 * inner)
        compute = flops / (setup.hardware.bf16_flops * setup.efficiency.experts)
        total += Term(compute + nbytes / setup.hardware.memory_bandwidth, flops, nbytes)
    return total


def residual_term(setup: Setup, step: Step) -> Term:
    """Hyper-connections, norms and activation casts: memory traffic of the PCP rank's rows, not shared over TP.

    Two sites a layer read the streams for the mixes, again for the collapse and again for the expansion, which writes
    them (model.md 3.1, 3.2). Activations are read and written once more where a linear's input is rounded per 32.
    """
    model = setup.model
    streams, hidden = model.hc_mult * model.hidden_size, model.hidden_size
    local_heads = -(-model.o_groups // setup.topology.tp)
    casts = 2 * hidden + model.q_lora_rank + model.moe_intermediate_size // setup.topology.tp
    casts += local_heads * (
        2 * model.heads_per_group * model.head_dim + model.o_lora_rank
    )  # rope of q, inverse of o, z
    total, dense = Term(), linears(model, setup.topology.tp)
    for layer, _, full in _layers(setup, step):
        rows = _rows(full) / setup.topology.pcp
        total += _moved(setup, BF16 * rows * (2 * (4 * streams + 2 * hidden) + 2 * casts))
        for linear in dense[layer.index]:
            if ".hc_" in linear.name:  # its input is counted above
                total += Term(0.0, 2.0 * rows * linear.outputs * linear.inputs, 0.0)
    return total


def all_reduce_term(setup: Setup, step: Step) -> Term:
    """TP all-reduces of the full hidden of every row of the PCP rank: embedding, and twice a layer."""
    width = BF16 * setup.model.hidden_size / setup.topology.pcp
    total = _collective(setup, "all_reduce", width * step.rows, setup.topology.tp)
    for _, _, full in _layers(setup, step):
        one = _collective(setup, "all_reduce", width * _rows(full), setup.topology.tp)
        total += one + one
    return total


def _pieces(chunks: tuple[Chunk, ...], pcp: int) -> list[tuple[int, float]]:
    """(number, rows) of the zigzag pieces of each chunk."""
    return [(min(2 * pcp, length), max(1.0, length / (2 * pcp))) for _, length in chunks]


def pcp_term(setup: Setup, step: Step) -> Term:
    """Exchange between PCP ranks: halo rows, ratio-2 partners, compressed latents, and the MoE's gather and scatter."""
    model, records, pcp = setup.model, setup.records, setup.topology.pcp
    if pcp == 1:
        return Term()
    total = Term()
    hidden = BF16 * model.hidden_size
    routing = 8 * model.experts_per_token  # an int32 id and an fp32 weight a choice
    for layer, written, full in _layers(setup, step):
        rows, entries = _rows(full), _rows(written) / max(1, layer.ratio)
        pieces = _pieces(written, pcp)
        halo = sum(n * min(model.window - 1, size) for n, size in pieces) * records.window
        total += _collective(setup, "all_gather", halo, pcp)
        if layer.owns_kv:
            total += _collective(setup, "all_gather", entries * (records.latent + records.index), pcp)
            if layer.ratio == 2:
                total += _collective(setup, "all_gather", sum(n for n, _ in pieces) * 2 * 4 * model.head_dim, pcp)
        total += _collective(setup, "all_gather", rows * (hidden + routing), pcp)
        total += _collective(setup, "reduce_scatter", rows * hidden, pcp)
    return total


def engram_term(setup: Setup, step: Step, before: float) -> Term:
    """Engram: wkv and gate on the PCP rank's rows, and what of the table fetch from host memory is not hidden.

    `before`: seconds of an average layer; fetches start with the step, so layer i's may take i layers (model.md 3.12).
    """
    model = setup.model
    row_bytes = model.engram_head_dim + model.engram_head_dim // 32 if model.quant else BF16 * model.engram_head_dim
    dense = linears(model, setup.topology.tp)
    total, fetched = Term(), 0.0
    for layer, _, full in _layers(setup, step):
        if layer.engram is None:
            continue
        rows = _rows(full) / setup.topology.pcp
        for linear in dense[layer.index]:
            if ".engram." in linear.name:
                total += _matmul(setup, linear, rows)
        total += _moved(setup, BF16 * rows * (3 * model.hc_mult + 1) * model.hidden_size)
        fetch = rows * model.engram_columns * row_bytes
        fetched += fetch / setup.hardware.host_bandwidth
        exposed = max(0.0, fetched - layer.index * before)
        fetched -= exposed
        total += Term(exposed, 0.0, fetch)
    return total


def launch_term(setup: Setup, device_seconds: float) -> Term:
    """What the host needs to launch the step beyond the device's own time: nothing where the device is the slower."""
    host = setup.model.num_layers * KERNELS_PER_LAYER * setup.hardware.launch_seconds
    return Term(max(0.0, host - device_seconds))


def step_cost(setup: Setup, step: Step) -> StepCost:
    """All terms of one step on one rank."""
    terms = {
        "gemm": gemm_term(setup, step),
        "attention": attention_term(setup, step),
        "index": index_term(setup, step),
        "moe": moe_term(setup, step),
        "residual": residual_term(setup, step),
        "all_reduce": all_reduce_term(setup, step),
        "pcp_exchange": pcp_term(setup, step),
    }
    device = sum(term.seconds for term in terms.values())
    terms["engram"] = engram_term(setup, step, device / setup.model.num_layers)
    terms["launch"] = launch_term(setup, device + terms["engram"].seconds)
    return StepCost(terms)
