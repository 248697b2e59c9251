"""Runs steps on one rank: a StepInput becomes index plans, a forward pass, logits and, on rank 0, sampled tokens.

This is the one place where a step meets the partition: rows are split here on the way in, and only the rows whose
logits are wanted leave a rank on the way out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paraflash.cache.records import kv_format
from paraflash.cache.store import KVCache, block_bytes, window_bytes
from paraflash.checkpoint.dummy import dummy_engram_tables, dummy_weights
from paraflash.checkpoint.load import Checkpoint, Weights, load_weights, open_engram_tables
from paraflash.checkpoint.memory import FP8_LINEARS, available_memory, check_memory
from paraflash.checkpoint.progress import show_progress
from paraflash.checkpoint.tensors import Shard, split_range
from paraflash.config.engine import EngineConfig
from paraflash.config.model import ModelConfig
from paraflash.engine.decode_step import decode_step, decode_tokens, decode_windows, padded_rows
from paraflash.engine.engram_rows import EngramRows, Lookup
from paraflash.engine.engram_shards import EngramShards
from paraflash.engine.graphs import StepGraphs, cuda_capture
from paraflash.engine.memory_plan import log_held, settle_dense_weights, step_room, usable_memory
from paraflash.engine.messages import Sampled, StepInput, StepOutput, StepRequest, TokenLogprobs
from paraflash.engine.pending import with_tokens
from paraflash.engine.sampler import prompt_logprobs, sample
from paraflash.engine.step_rows import in_blocks, prompt_step, rows_at, spans_of
from paraflash.kernels import make_kernels
from paraflash.model import engram_hash
from paraflash.model.batch import LocalBatch, build_batch, build_trailing, plan_of
from paraflash.model.decode_batch import build_decode_batch, dealt
from paraflash.model.inputs import Inputs, Packed, step_shape
from paraflash.model.transformer import Transformer, no_probe
from paraflash.model.weights import Numerics, pack_linears
from paraflash.parallel.exchange import RowGather
from paraflash.parallel.mesh import Mesh, use_copies
from paraflash.parallel.plan import own_part, pick_rows

DEFAULT_CPU_KV_BYTES = 1 << 30
ROUTING_BYTES = 12  # of a row for each of its experts: id and weight
LOGIT_ROWS = 256  # rows of logits held at a time for prompt log-probabilities


class ModelRunner:
    """`config` is resolved (no "auto" left). Call `load` before the first step."""

    def __init__(self, config: EngineConfig, model: ModelConfig, mesh: Mesh):
        self.config, self.model_config, self.mesh = config, model, mesh
        self._shard = Shard(mesh.rank, mesh.tp.size, mesh.world)
        self.progress: Callable[[], None] = lambda: None
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
        self.numerics = Numerics(
            dtype=dtype,
            trained_rounding=config.kv_cache_rounding == "trained",
            round_inputs=model.quant is not None and dtype == torch.bfloat16,
        )
        self.format = kv_format(config.kv_cache_dtype, model.head_dim, model.rope_dim, model.index_head_dim)
        self.kernels = make_kernels(mesh.device, dtype, config.moe_backend, self.numerics.trained_rounding)
        self._drawn: dict[str, Sampled] = {}  # rank 0: of the last step, by request
        self.graphs: StepGraphs | None = None  # over gloo collectives wait on the host
        if mesh.device.type == "cuda" and not config.enforce_eager and not (mesh.tp.gloo or mesh.pcp.gloo):
            self.graphs = StepGraphs(mesh, cuda_capture(mesh.device))

    def load(self) -> None:
        """Loads this rank's weights and allocates the caches, equally large on all ranks."""
        config, model, mesh = self.config, self.model_config, self.mesh
        if mesh.pcp.own_stream and not config.disable_custom_all_reduce:
            assert config.max_num_batched_tokens is not None  # and before the memory that is left is divided
            row = model.hidden_size * self.numerics.dtype.itemsize + model.experts_per_token * ROUTING_BYTES
            use_copies(mesh, config.max_num_batched_tokens, row)
        first_expert, _ = self._shard.experts(model.num_experts)
        first_token, _ = split_range(model.vocab_size, mesh.tp.rank, mesh.tp.size)
        self.token_map = None
        slots, graphs = self._slots + self._spare_slots, self.graphs is not None
        self.dense_weights = settle_dense_weights(
            config, model, mesh, self.format, self.kernels, slots, self._spare_rows, graphs
        )
        weights = self._load_weights()
        pack_linears(weights, self.kernels)
        if model.engram_layers:
            engram_hash.check_tables(model)
            path = Path(config.tokenizer or config.model) / "tokenizer.json"
            if config.load_format == "dummy" and not path.exists():
                self.token_map = np.arange(model.vocab_size, dtype=np.int64) % model.engram_compressed_vocab_size
            else:
                self.token_map = engram_hash.load_token_map(path, model)
        self.engram: EngramRows | EngramShards = (
            EngramShards(self.tables, mesh) if config.engram_on_device else EngramRows(self.tables, mesh.device)
        )
        self.weight_bytes = sum(w.nbytes for w in weights.values())
        self.transformer = Transformer(model, weights, self.kernels, self.numerics, mesh, first_expert, first_token)
        del weights
        self.step_bytes = 0
        if mesh.device.type == "cuda" and config.num_gpu_blocks_override is None:
            self.step_bytes = self._measure_step()
        blocks = mesh.agree_min(self._affordable_blocks(self.step_bytes))
        size = blocks * block_bytes(model, self.format, config.block_size)
        size += (self._slots + self._spare_slots) * window_bytes(model, self.format)
        check_memory(size, mesh.device, f"a KV cache of {blocks} blocks and {self._slots} windows")
        self.cache = self._make_cache(blocks, self._slots)
        log_held(self.cache_info())

    def _load_weights(self) -> Weights:
        """This rank's shard; also opens the Engram tables. Rank 0 shows the progress of its own shard."""
        config, model, mesh = self.config, self.model_config, self.mesh
        dtype, stored = self.numerics.dtype, self.kernels.stored
        stored += (FP8_LINEARS,) if self.dense_weights == "fp8" else ()
        self.tables: Sequence[Any]
        with contextlib.ExitStack() as stack:
            progress = stack.enter_context(show_progress("Loading weights (rank 0)")) if mesh.rank == 0 else None
            if config.load_format == "dummy":
                self.tables = dummy_engram_tables(model, dtype, config.seed, mesh.device)
                return dummy_weights(model, self._shard, dtype, mesh.device, config.seed, stored, progress)
            checkpoint = Checkpoint.open(config.model)
            self.tables = open_engram_tables(checkpoint, model, dtype)
            return load_weights(checkpoint, model, self._shard, dtype, mesh.device, stored, progress)

    @property
    def _slots(self) -> int:
        assert self.config.max_num_seqs is not None
        return self.config.max_num_seqs

    def _make_cache(self, blocks: int, slots: int) -> KVCache:
        model, size, device = self.model_config, self.config.block_size, self.mesh.device
        return KVCache(model, self.format, blocks, size, slots, device, self._spare_rows, self._spare_slots)

    @property
    def _spare_slots(self) -> int:
        """Slots of no request: one for the rows that fill up a decode step."""
        return 0 if self.graphs is None else 1

    @property
    def _spare_rows(self) -> int:
        """Most window rows of a step on a GPU: earlier ones, a step's own and those of other ranks."""
        if self.mesh.device.type != "cuda":
            return 0
        assert self.config.max_num_batched_tokens is not None
        decoded = padded_rows(self._slots, self.mesh.pcp.size)
        return 2 * max(self.config.max_num_batched_tokens, decoded) + decoded * self.model_config.window

    def _measure_step(self) -> int:
        """Bytes that the largest step takes beside weights and caches. Running it also compiles the kernels."""
        config, model = self.config, self.model_config
        assert config.max_num_batched_tokens is not None
        tokens = min(config.max_num_batched_tokens, model.max_position_embeddings)
        used = -(-tokens // config.block_size)
        self.cache = self._make_cache(used + 1, 1)
        graphs, self.graphs = self.graphs, None  # a graph would hold on to this cache
        torch.cuda.reset_peak_memory_stats(self.mesh.device)
        before = torch.cuda.memory_allocated(self.mesh.device)
        for rows in sorted({min(n, tokens) for n in (1, 512, 2048, tokens)}):
            self.execute(prompt_step(rows, model.vocab_size, used))
        torch.cuda.synchronize(self.mesh.device)
        peak = torch.cuda.max_memory_allocated(self.mesh.device) - before
        del self.cache
        torch.cuda.empty_cache()
        self.graphs = graphs
        return step_room(peak, graphs is not None)

    def _affordable_blocks(self, step_bytes: int) -> int:
        """Blocks of KV that fit, the null block included; never more than all requests together can use."""
        config, model = self.config, self.model_config
        if config.num_gpu_blocks_override is not None:
            return config.num_gpu_blocks_override + 1
        per_block = max(1, block_bytes(model, self.format, config.block_size))
        budget = config.kv_cache_memory_bytes
        if budget is None:
            windows = (self._slots + self._spare_slots) * window_bytes(model, self.format)
            if self.mesh.device.type == "cuda":
                budget = usable_memory(self.mesh.device, config.gpu_memory_utilization) - step_bytes - windows
                budget -= self._spare_rows * self.format.latent.nbytes
            else:
                free = available_memory(self.mesh.device) or 0
                budget = min(int(free * 0.5 / self.mesh.world) - windows, DEFAULT_CPU_KV_BYTES)
        length = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
        useful = self._slots * -(-length // config.block_size)
        blocks = min(budget // per_block, useful)
        if blocks < 1:
            raise MemoryError(
                f"the KV budget of {budget} bytes holds no block of {per_block} bytes next to {self._slots} windows of "
                f"{window_bytes(model, self.format)} bytes; lower max_num_seqs or raise kv_cache_memory_bytes"
            )
        return blocks + 1

    def cache_info(self) -> dict[str, Any]:
        """What this rank holds, in bytes and blocks."""
        on_device = self.engram if isinstance(self.engram, EngramShards) else None
        return {
            "rank": self.mesh.rank,
            "device": str(self.mesh.device),
            "num_blocks": self.cache.num_blocks,
            "block_bytes": block_bytes(self.model_config, self.format, self.config.block_size),
            "window_bytes": window_bytes(self.model_config, self.format),
            "cache_bytes": self.cache.nbytes,
            "weight_bytes": self.weight_bytes,
            "step_bytes": self.step_bytes,  # set aside on a GPU for activations and workspaces
            "engram_host_bytes": sum(table.rows * table.dim for table in self.tables) if not on_device else 0,
            "engram_device_bytes": on_device.nbytes if on_device else 0,
            "kv_cache_dtype": self.format.name,
            "dense_weights": self.dense_weights,
            "copied_exchange": self.mesh.pcp.copies is not None,  # large exchanges of the experts by copy engines
            "graphs": None if self.graphs is None else self.graphs.counts(),
            "kernels": self.kernels.name,
            "kernel_choices": dict(self.kernels.info),
        }

    def cache_hash(self) -> str:
        return self.cache.digest()

    def start_collective_log(self) -> None:
        self.mesh.start_log()

    def collective_log(self) -> list[Any]:
        return self.mesh.take_log()

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput | None:
        """Runs one step. Returns its output on rank 0, None elsewhere."""
        step = with_tokens(step, self._drawn, self.mesh)
        graphs = self.graphs if self.transformer.probe is no_probe else None
        if graphs is not None and step.columns.is_decode:
            output = self._decode(step, graphs)
        else:
            output = self._run(step, graphs)
        seconds = self.mesh.take_seconds()
        if output is not None:
            output.timings = seconds
            self._drawn = output.sampled
        return output

    def _decode(self, step: StepInput, graphs: StepGraphs) -> StepOutput | None:
        """A step that decodes one row of each request, as a recorded pass over that number of rows or some more."""
        columns, model, mesh, size = step.columns, self.model_config, self.mesh, self.config.block_size
        count, spare_slot, ranks = len(columns.request_ids), self._slots, mesh.pcp.size
        rows = padded_rows(count, ranks)
        counts, order = dealt(rows, ranks)
        own = order[own_part(counts, mesh.pcp.rank)]
        tokens = decode_tokens(columns, rows)
        staged = no_bytes
        if self.token_map is not None:
            windows = decode_windows(columns, tokens, model.engram_max_ngram)[own]
            staged = self.engram.stage(engram_hash.hash_windows(model, self.token_map, windows))
        batch = build_decode_batch(decode_step(columns, rows, spare_slot, size), model, mesh, size, spare_slot)
        packed = Packed(Inputs(torch.from_numpy(tokens[own]), batch, None), pinned=mesh.device.type == "cuda")
        hidden = graphs.run(packed, staged, self._forward_staged)
        self.progress()
        counts, order = dealt(count, ranks)  # of each rank's rows those of requests come first
        found = RowGather(mesh.pcp, counts, "sampled").gather(hidden[: counts[mesh.pcp.rank]])
        logits = self.transformer.logits(found)
        if mesh.rank != 0:
            return None
        requests = order.tolist()
        every = columns.specs()
        specs = [spec for i in requests if (spec := every[i]) is not None]
        names = [columns.request_ids[i] for i in requests]
        return StepOutput(step.step_id, dict(zip(names, sample(logits, specs, model.vocab_size), strict=True)))

    def _run(self, step: StepInput, graphs: StepGraphs | None) -> StepOutput | None:
        """Any step; one of whole blocks of prompts as a recorded pass."""
        requests, model, mesh, size = step.requests, self.model_config, self.mesh, self.config.block_size
        spans = spans_of(requests)
        plan = plan_of(spans, mesh.pcp.size)
        local = plan.rows[mesh.pcp.rank]
        hashed = self._engram_ids(requests, local)
        replays = graphs is not None and all(in_blocks(r, size) for r in requests)
        staged, lookup = no_bytes, None
        if hashed is not None and replays:
            staged = self.engram.stage(hashed)
        elif hashed is not None:
            lookup = self.engram.start(hashed, RowGather(mesh.pcp, [len(r) for r in plan.rows], "engram"))
        batch = build_batch(spans, plan, model, mesh, size)
        kept = [
            s.length if r.kept_rows < 0 else min(r.kept_rows, s.length) for r, s in zip(requests, spans, strict=True)
        ]
        trailing = None
        if any(k < s.length for k, s in zip(kept, spans, strict=True)):
            trailing = build_trailing(spans, kept, batch, model, mesh, size)
        token_ids = np.concatenate([r.token_ids for r in requests]).astype(np.int64)[local]
        inputs = Inputs(torch.from_numpy(token_ids), batch, trailing)
        if graphs is not None and replays:
            inputs.step = step_shape(spans, kept, model.window)
            packed = Packed(inputs, pinned=mesh.device.type == "cuda")
            hidden = graphs.run(packed, staged, self._forward_staged)
        elif mesh.device.type == "cuda":
            hidden = self._forward(Packed(inputs, pinned=True).sent_to(mesh.device), lookup)
        else:
            hidden = self._forward(inputs, lookup)
        self.progress()
        return self._finish(step, hidden, trailing.batch if trailing else batch)

    def _forward(self, inputs: Inputs, engram: Lookup | None) -> Tensor:
        """engram: None for a model without Engram layers."""
        return self.transformer.forward(
            inputs.token_ids, engram or no_rows, inputs.batch, self.cache, inputs.trailing, self.progress
        )

    def _forward_staged(self, inputs: Inputs, engram: Tensor) -> Tensor:
        count, columns = len(inputs.token_ids), self.model_config.engram_columns
        return self._forward(inputs, self.engram.staged_rows(engram, count, columns, inputs.batch.all_rows))

    def _engram_ids(self, requests: Sequence[StepRequest], local: np.ndarray) -> np.ndarray | None:
        """[T, layers, columns] Engram rows that this rank's tokens read. Known on every rank: they need no exchange."""
        model = self.model_config
        if self.token_map is None:
            return None
        windows = [engram_hash.make_windows(r.token_ids, r.lookback, model.engram_max_ngram) for r in requests]
        ids = engram_hash.hash_windows(model, self.token_map, np.concatenate(windows)[local])
        self.transformer.probe("engram.hash_ids", ids)
        return ids

    def _finish(self, step: StepInput, hidden: Tensor, batch: LocalBatch) -> StepOutput | None:
        """Gathers the rows whose logits are wanted and turns them into tokens on rank 0."""
        mesh = self.mesh
        wanted: set[tuple[int, int]] = set()  # (request, position)
        for i, r in enumerate(step.requests):
            end = r.num_computed + r.num_tokens
            if r.sample is not None:
                wanted.add((i, end - 1))
            if r.prompt_logprobs is not None:
                wanted.update((i, p) for p in range(r.num_computed, end))
        assert batch.plan is not None
        keys, counts, mine = pick_rows(batch.plan, wanted, mesh.pcp.rank)
        rows = RowGather(mesh.pcp, counts, "sampled").gather(rows_at(hidden, mine))
        place = {key: row for row, key in enumerate(keys)}

        sampled = [
            (i, place[i, r.num_computed + r.num_tokens - 1])
            for i, r in enumerate(step.requests)
            if r.sample is not None
        ]
        output = StepOutput(step.step_id)
        if sampled:
            logits = self.transformer.logits(rows_at(rows, np.array([row for _, row in sampled])))
            if mesh.rank == 0:
                specs = [spec for i, _ in sampled if (spec := step.requests[i].sample) is not None]
                tokens: list[Sampled] = sample(logits, specs, self.model_config.vocab_size)
                output.sampled = {step.requests[i].request_id: t for (i, _), t in zip(sampled, tokens, strict=True)}
        for i, r in enumerate(step.requests):
            if r.prompt_logprobs is not None and r.prompt_targets is not None:
                offsets = np.flatnonzero(r.prompt_targets >= 0)
                found = self._prompt_logprobs(rows[[place[i, r.num_computed + int(o)] for o in offsets]], r, offsets)
                output.prompt_logprobs[r.request_id] = found
        return output if mesh.rank == 0 else None

    def _prompt_logprobs(self, rows: Tensor, request: StepRequest, offsets: np.ndarray) -> list[TokenLogprobs]:
        assert request.prompt_targets is not None and request.prompt_logprobs is not None
        found: list[TokenLogprobs] = []
        for a in range(0, len(rows), LOGIT_ROWS):
            logits = self.transformer.logits(rows[a : a + LOGIT_ROWS])
            if self.mesh.rank == 0:
                targets = torch.from_numpy(request.prompt_targets[offsets[a : a + LOGIT_ROWS]].astype(np.int64))
                found += prompt_logprobs(logits, targets.to(logits.device), request.prompt_logprobs)
        return found


def no_rows(n: int) -> Tensor:
    raise ValueError(f"Engram layer {n} of a model without any")


def no_bytes() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
