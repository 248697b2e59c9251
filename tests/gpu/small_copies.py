"""A runner whose exchanges go by copy engines however small they are, for engines of tiny models."""

from __future__ import annotations

from paraflash.engine import runner
from paraflash.parallel import copies


class SmallCopiesRunner(runner.ModelRunner):
    def load(self) -> None:
        copies.LEAST_BYTES = 1
        super().load()
        if self.mesh.pcp.size > 1 and not self.config.disable_custom_all_reduce:
            assert self.mesh.pcp.copies is not None
