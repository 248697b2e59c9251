"""The messages between the HTTP process and the engine process: typed structs, msgpack on two zmq ipc sockets.

`Start`, `Add`, `Abort`, `Stop` flow to the engine process; `Ready`, `Added`, `Refused`, `Updates`, `Dead` flow back.
A prompt travels as little-endian int32 bytes, everything else as msgpack.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from paraflash.config.engine import EngineConfig
from paraflash.engine.request import Delta
from paraflash.engine.sampling_params import SamplingParams


class Start(msgspec.Struct, tag=True):
    """First message: builds the engine as `factory(config)`; `factory` is "package.module:name"."""

    factory: str
    config: EngineConfig


class Add(msgspec.Struct, tag=True):
    request_id: str
    prompt: bytes  # int32 token ids
    params: SamplingParams
    cache_salt: str | None = None


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class Stop(msgspec.Struct, tag=True):
    """The engine process ends its workers and exits with status 0."""


class Ready(msgspec.Struct, tag=True):
    info: dict[str, Any]
    stats: dict[str, Any]


class Added(msgspec.Struct, tag=True):
    request_id: str


class Refused(msgspec.Struct, tag=True):
    """The engine did not take a request. kind: `bad` (the request is wrong), `busy` (try later), `failed`."""

    request_id: str
    kind: str
    message: str
    field: str | None = None


class Updates(msgspec.Struct, tag=True):
    deltas: list[Delta]
    stats: dict[str, Any]


class Dead(msgspec.Struct, tag=True):
    """The last message. `refused`: the configuration is at fault, not the engine."""

    message: str
    refused: bool = False


ToEngine = Start | Add | Abort | Stop
FromEngine = Ready | Added | Refused | Updates | Dead

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def pack_prompt(token_ids: list[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def unpack_prompt(data: bytes) -> list[int]:
    return np.frombuffer(data, dtype="<i4").tolist()
