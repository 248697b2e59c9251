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
from training.tasks import vocab
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


def export(weights: Path, folder: Path) -> int:
    """Bytes of the checkpoint made of what train.py wrote into `weights`."""
    raw = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    model = Miniature(parse_config(raw))
    load(model, weights)
    return write_model(folder, raw, model.parameters_by_name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="folder that training.train wrote")
    parser.add_argument("folder", type=Path, help="checkpoint folder to write")
    options = parser.parse_args()
    size = export(options.weights, options.folder)
    print(f"{options.folder}: {size / 1e6:.2f} MB of at most {MOST_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
