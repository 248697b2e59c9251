"""From a checkpoint folder to the weights of one rank: headers, checks, then only the bytes of the rank's shard.

`load_weights` returns name -> tensor; the routed experts of a layer come stacked under `layers.L.ffn.experts.w1|w2|w3`
as [local experts, out, in]. Engram tables stay in their file and are opened by `open_engram_tables`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paraflash.checkpoint.engram_table import EngramTable
from paraflash.checkpoint.files import CheckpointError, Entry, read_header, read_rows
from paraflash.checkpoint.memory import check_memory, keeps, rank_bytes
from paraflash.checkpoint.quant import E8M0_NAN, QuantTensor, fp4_dequant, fp8_block_dequant
from paraflash.checkpoint.tensors import BLOCK, SKIPPED, Shard, Slices, TensorSpec, shard_slices, tensor_table
from paraflash.config.model import ModelConfig

Weights = dict[str, Tensor | QuantTensor]
Progress = Callable[[int, int], None]  # bytes read so far, bytes in all

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_COPY_BYTES = 8 << 20  # stored bytes that are read at a time
_DECODE_BYTES = 1 << 19  # the same where codes become fp32 values on the way, which takes up to 20 times as much
_LISTED = 20


@dataclass(frozen=True)
class Checkpoint:
    """The headers of a checkpoint folder; no tensor data."""

    folder: Path
    entries: dict[str, Entry]

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Reads the headers of a sharded (index) or single-file checkpoint. Raises CheckpointError."""
        folder = Path(folder)
        index = folder / INDEX
        if index.exists():
            return cls(folder, _read_indexed(index))
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}")
        return cls(folder, read_header(folder / SINGLE))

    def text_entries(self) -> dict[str, Entry]:
        """Without the tensors that a text engine skips (vision, aligner, image vectors, draft layers)."""
        return {name: entry for name, entry in self.entries.items() if not SKIPPED.match(name)}

    def check(self, model: ModelConfig) -> None:
        """Compares names, dtypes and shapes with the table. Raises one CheckpointError that names what differs."""
        found, problems = self.text_entries(), []
        for spec in tensor_table(model):
            wanted = [(spec.name, spec.stored_dtype, spec.stored_shape)]
            if spec.scale_name:
                wanted.append((spec.scale_name, "F8_E8M0", spec.scale_shape))
            for name, dtype, shape in wanted:
                entry = found.pop(name, None)
                if entry is None:
                    if not spec.optional:
                        problems.append(f"missing: {name} {dtype} {list(shape)}")
                elif (entry.dtype, entry.shape) != (dtype, shape):
                    problems.append(f"{name} is {entry.dtype} {list(entry.shape)}, not {dtype} {list(shape)}")
        problems += [f"unexpected: {name} {entry.dtype} {list(entry.shape)}" for name, entry in found.items()]
        if problems:
            shown = problems[:_LISTED] + ([f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else [])
            raise CheckpointError(
                f"{self.folder} does not hold the model of its config.json ({len(problems)} differences):\n  "
                + "\n  ".join(shown)
            )


def _read_indexed(index: Path) -> dict[str, Entry]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(Path(name).name) for name in weight_map.values()})
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {type(error).__name__}: {error}") from None
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in read_header(index.parent / file).items():
            if weight_map.get(name) != file:
                where = weight_map.get(name, "no file")
                raise CheckpointError(f"{index} lists {name} in {where}, but {file} holds it")
            entries[name] = entry
    absent = [f"{name} ({file})" for name, file in weight_map.items() if name not in entries]
    if absent:
        shown = ", ".join(absent[:_LISTED])
        raise CheckpointError(f"{index} lists {len(absent)} tensors that their files do not hold: {shown}")
    return entries


def load_weights(
    checkpoint: Checkpoint,
    model: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device | str,
    keep_quantized: bool | Collection[str] = False,
    progress: Progress | None = None,
) -> Weights:
    """Reads this rank's shard. BF16 and quantised tensors become `dtype`, F32 tensors stay fp32.

    With keep_quantized, FP8 and FP4 tensors (or those of the kinds it names) come as `QuantTensor`, as stored. At no
    time does it hold more than the shard and one chunk of a tensor. Run `checkpoint.check(model)` first. Raises
    CheckpointError for a NaN scale or a short file, `NotEnoughMemory` before anything is read.
    """

    def fill(target: Tensor | QuantTensor, spec: TensorSpec, slices: Slices) -> None:
        _fill(target, checkpoint, spec, slices)

    return assemble(model, shard, dtype, device, keep_quantized, progress, fill)


def assemble(
    model: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device | str,
    keep_quantized: bool | Collection[str],
    progress: Progress | None,
    fill: Callable[[Tensor | QuantTensor, TensorSpec, Slices], None],
) -> Weights:
    """Allocates a rank's tensors one by one and has `fill` write the values of each. Arguments as `load_weights`."""
    needed = rank_bytes(model, shard, dtype.itemsize, keep_quantized).device
    check_memory(needed, device)
    weights: Weights = {}
    todo = [
        (spec, slices)
        for spec in tensor_table(model)
        if not spec.optional and (slices := shard_slices(spec, shard)) is not None
    ]
    total, done = sum(_stored_bytes(spec, slices) for spec, slices in todo), 0
    first, end = shard.experts(model.num_experts)
    for spec, slices in todo:
        keep = keeps(spec, slices, keep_quantized)
        if spec.expert is None:
            target = weights[spec.name] = _allocate(spec, slices, None, dtype, device, keep)
        else:
            key = str(spec.stack)
            if key not in weights:
                weights[key] = _allocate(spec, slices, end - first, dtype, device, keep)
            target = _pick(weights[key], spec.expert - first)
        fill(target, spec, slices)
        done += _stored_bytes(spec, slices)
        if progress is not None:
            progress(done, total)
    return weights


def open_engram_tables(checkpoint: Checkpoint, model: ModelConfig, dtype: torch.dtype) -> list[EngramTable]:
    """One memory-mapped table per Engram layer, in the order of model.engram_layers."""
    tables = []
    for layer in model.engram_layers:
        name = f"layers.{layer}.engram.embed."
        tables.append(EngramTable(checkpoint.entries[name + "weight"], checkpoint.entries.get(name + "scale"), dtype))
    return tables


def _stored_bytes(spec: TensorSpec, slices: Slices) -> int:
    values = 1
    for part in slices:
        values *= part.stop - part.start
    return {"bf16": 2 * values, "f32": 4 * values, "fp8": values, "fp4": values // 2, "engram": values}[spec.dtype]


def _blocks(part: slice) -> slice:
    """The scale blocks that cover a range of rows or columns."""
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _allocate(
    spec: TensorSpec, slices: Slices, experts: int | None, dtype: torch.dtype, device: torch.device | str, keep: bool
) -> Tensor | QuantTensor:
    lead = () if experts is None else (experts,)
    shape = tuple(part.stop - part.start for part in slices)
    if not keep:
        return torch.empty((*lead, *shape), dtype=torch.float32 if spec.dtype == "f32" else dtype, device=device)
    if spec.dtype == "fp4":
        data = torch.empty((*lead, shape[0], shape[1] // 2), dtype=torch.uint8, device=device)
        scale = torch.empty((*lead, shape[0], shape[1] // BLOCK), dtype=torch.uint8, device=device)
        return QuantTensor("fp4", data, scale)
    data = torch.empty((*lead, *shape), dtype=torch.float8_e4m3fn, device=device)
    rows, cols = (_blocks(part) for part in slices)
    scale = torch.empty((*lead, rows.stop - rows.start, cols.stop - cols.start), dtype=torch.uint8, device=device)
    return QuantTensor("fp8", data, scale, slices[0].start % BLOCK, slices[1].start % BLOCK)


def _pick(stack: Tensor | QuantTensor, index: int) -> Tensor | QuantTensor:
    """One expert of a stack, as a view."""
    if isinstance(stack, QuantTensor):
        return QuantTensor(stack.kind, stack.data[index], stack.scale[index], stack.row0, stack.col0)
    return stack[index]


def row_chunks(rows: slice, row_bytes: int, size: int = _DECODE_BYTES) -> Iterator[tuple[int, int]]:
    """Cuts a range of rows into runs of about `size` bytes that end on scale blocks."""
    step = max(BLOCK, size // max(row_bytes, 1) // BLOCK * BLOCK)
    start = rows.start
    while start < rows.stop:
        end = min(rows.stop, (start + step) // BLOCK * BLOCK)
        yield start, end
        start = end


def _read_scale(checkpoint: Checkpoint, spec: TensorSpec, rows: slice, cols: slice) -> Tensor:
    scale = read_rows(checkpoint.entries[str(spec.scale_name)], rows.start, rows.stop)[:, cols]
    if (scale == E8M0_NAN).any():
        raise CheckpointError(f"{spec.scale_name} holds the scale byte 255, which is NaN; the file is damaged")
    return scale


def _fill(target: Tensor | QuantTensor, checkpoint: Checkpoint, spec: TensorSpec, slices: Slices) -> None:
    """Reads `slices` of one tensor into `target`, a chunk of rows at a time."""
    entry = checkpoint.entries[spec.name]
    rows = slices[0]
    if isinstance(target, QuantTensor):
        cols = slices[1]
        scale_rows = rows if spec.dtype == "fp4" else _blocks(rows)
        target.scale.copy_(_read_scale(checkpoint, spec, scale_rows, _blocks(cols)))
    decode = spec.scale_name is not None and isinstance(target, Tensor)
    chunk = _DECODE_BYTES if decode else _COPY_BYTES
    for start, end in row_chunks(rows, entry.nbytes // max(entry.shape[0], 1), chunk):
        stored = read_rows(entry, start, end)
        here = slice(start - rows.start, end - rows.start)
        if isinstance(target, QuantTensor):
            part = slice(cols.start // 2, cols.stop // 2) if spec.dtype == "fp4" else cols
            target.data[here].copy_(stored[:, part])
            continue
        if spec.scale_name is None:
            values = stored[:, slices[1]] if len(slices) > 1 else stored
        elif spec.dtype == "fp4":
            values = fp4_dequant(stored, _read_scale(checkpoint, spec, slice(start, end), slice(None)))[:, slices[1]]
        else:
            scale = _read_scale(checkpoint, spec, _blocks(slice(start, end)), _blocks(slices[1]))
            values = fp8_block_dequant(stored[:, slices[1]], scale, start % BLOCK, slices[1].start % BLOCK)
        target[here].copy_(values)
