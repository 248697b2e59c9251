"""A checkpoint folder as the trainer's model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from paraflash.config.model import ModelConfig, load_config
from tests import oracle
from training.model import Miniature
from training.weights import from_checkpoint


def stored_model(folder: Path) -> tuple[Miniature, ModelConfig]:
    config = load_config(folder)
    model = Miniature(config)
    values = from_checkpoint(config, oracle.dequant(load_file(folder / "model.safetensors")))
    with torch.no_grad():
        for name, parameter in model.parameters_by_name.items():
            parameter.copy_(values[name])
    return model, config
