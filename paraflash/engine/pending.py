"""Tokens that a step leaves open because the step before it, still running when it was made, samples them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from paraflash.engine.messages import Sampled, StepInput, step_of
from paraflash.parallel.mesh import Mesh


def with_tokens(step: StepInput, drawn: Mapping[str, Sampled], mesh: Mesh) -> StepInput:
    """The step with all its tokens. drawn: on rank 0 what the step before sampled, by request; rank 0 tells the others.

    Every rank sees from the step itself whether there is anything to tell, so all enter the exchange or none.
    """
    columns = step.columns
    pending = columns.pending()
    if not pending:
        return step
    tokens = [drawn[columns.request_ids[i]].token_id if mesh.rank == 0 else 0 for i in pending]
    if mesh.world > 1:
        x = torch.tensor(tokens, device=mesh.device)
        for group in (mesh.tp, mesh.pcp):  # what rank 0 sent is the first part of both
            x = group.all_gather(x, "tokens")[: len(pending)]
        tokens = x.tolist()
    return step_of(step.step_id, columns.with_tokens(pending, np.array(tokens)))
