"""From the trainer's weights to a checkpoint in the released format: `python -m training.export WEIGHTS FOLDER`.

WEIGHTS holds config.json and weights-*.safetensors (fp32, stacked parameters); FOLDER gets config.json,
model.safetensors (FP8 32x32 linears, FP4 experts, FP8 Engram rows, BF16 and F32 for the rest), and the tokenizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from paraflash.checkpoint.writer import write_checkpoint
from paraflash.config.model import parse_config
from training.model import Miniature
from training.tasks import TASKS, vocab
from training.train import load
from training.vocabulary import write_tokenizer
from training.weights import to_checkpoint

MOST_BYTES = 12_000_000  # of all files together: what the repository may carry


def write_model(folder: Path, raw: dict[str, Any], parameters: dict[str, Tensor]) -> int:
    """Writes stacked fp32 `parameters` of the released-layout config `raw`; returns the bytes of all files.

    Raises ValueError for a value that is not finite (by the writer) and for a folder of more than MOST_BYTES.
    """
    config = parse_config(raw)
    write_tokenizer(folder, vocab())
    write_checkpoint(folder, raw, to_checkpoint(config, parameters).items())
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if size > MOST_BYTES:
        raise ValueError(f"{folder} has {size} bytes; at most {MOST_BYTES} are allowed")
    return size


def card(parameters: int, size: int, log: list[dict[str, Any]]) -> str:
    """The model card: what the checkpoint is, its size and, where the trainer measured them, its accuracies."""
    lines = [
        "# A trained miniature",
        "",
        f"{parameters / 1e6:.2f} M parameters, {size / 1e6:.2f} MB in the released format: FP8 linears in 32x32 "
        "blocks, FP4 routed experts, FP8 Engram rows.",
        "It knows nothing but six generated tasks: key-value recall with two-word keys (pairs) and with codes "
        "(recall), fixed facts (ngram), copy, sort, and word problems of one or two steps (arithmetic).",
        "Prompts are single user turns without thinking. All data is generated from a seed by the scripts in "
        "`training/`. Licence: Apache-2.0.",
        "",
        "To make it again, on a GPU, from the root of the repository (`training/README.md` tells more):",
        "",
        "```",
        "python -m training.train --stage 1 --out build/stage1 --workers 12",
        "python -m training.train --stage 2 --start build/stage1 --out build/stage2 --workers 12",
        "python -m training.export build/stage2 tests/data/miniature/checkpoint",
        "```",
    ]
    ends = [row for row in log if row.get("eval") == "end" and all(t in row for t in TASKS)][-2:]
    broken = [row for row in log if row.get("eval") == "end" and "recall" not in row][-2:]
    if ends:
        lines += ["", "Accuracy of greedy answers in per cent, by the trainer, with the trained cache rounding:", ""]
        lines += ["| Weights | " + " | ".join(TASKS) + " |", "| --- |" + " --- |" * len(TASKS)]
        lines += [f"| {row['weights']} | " + " | ".join(f"{100 * row[t]:.1f}" for t in TASKS) + " |" for row in ends]
    if broken:
        lines += [
            "",
            "Pairs with entries of ratio 2 missing or broken, likewise:",
            "",
            "| Broken | pairs |",
            "| --- | --- |",
        ]
        lines += [f"| {row['weights']} | {100 * row['pairs']:.1f} |" for row in broken]
    return "\n".join(lines) + "\n"


def export(weights: Path, folder: Path) -> int:
    """Bytes of the checkpoint made of what train.py wrote into `weights`; README.md is its model card."""
    raw = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    model = Miniature(parse_config(raw))
    load(model, weights)
    size = write_model(folder, raw, model.parameters_by_name)
    log = weights / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    parameters = sum(p.numel() for p in model.parameters())
    (folder / "README.md").write_text(card(parameters, size, rows), encoding="utf-8")
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="folder that training.train wrote")
    parser.add_argument("folder", type=Path, help="checkpoint folder to write")
    options = parser.parse_args()
    size = export(options.weights, options.folder)
    print(f"{options.folder}: {size / 1e6:.2f} MB of at most {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
