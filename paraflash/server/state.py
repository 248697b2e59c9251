"""What all routes share: the engine, the tokenizer, the limits, the metrics, and the options of the server."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from paraflash.engine.client import AsyncEngine
from paraflash.server.chat_codec import ChatCodec
from paraflash.server.errors import ApiError, first_line
from paraflash.server.metrics import Metrics
from paraflash.server.sampling import Limits
from paraflash.server.tokens import TextTokenizer

logger = logging.getLogger("paraflash.server")


@dataclass(frozen=True)
class ServerOptions:
    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 2**20
    prompt_tokens_details: bool = False
    force_include_usage: bool = False
    log_requests: bool = False


@dataclass
class ServerState:
    engine: AsyncEngine
    tokenizer: TextTokenizer
    chat: ChatCodec
    limits: Limits
    metrics: Metrics
    options: ServerOptions
    started: float  # seconds since the epoch
    draining: bool = False  # the server is ending: nothing new is taken
    reported: set[str] = field(default_factory=set)  # unknown fields that have been logged

    def check_model(self, name: str | None) -> str:
        """The name to answer under. Raises 404 for a model that is not served."""
        if name is None:
            return self.options.served_names[0]
        if name not in self.options.served_names:
            served = ", ".join(self.options.served_names)
            raise ApiError(404, f"The model `{name[:200]}` does not exist; this server has {served}.", "model")
        return name

    def check_open(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is shutting down")
        if self.engine.dead is not None:
            raise ApiError(503, f"the engine is not available: {first_line(self.engine.dead)}")

    def note_unknown(self, extra: dict[str, Any] | None) -> None:
        """Logs fields that have no meaning here, each name once."""
        for name in (extra or {}).keys() - self.reported:
            if len(self.reported) < 1000:
                self.reported.add(name)
                logger.info("request field %.100r has no meaning here and is ignored", name)
