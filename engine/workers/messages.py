"""What a worker and its executor say to each other. Torch-free.

Steps travel in core's own form (StepPlan, StepResult); all else is a message of this file. On the wire one byte tells
the two apart; in one process the objects themselves are handed over.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.engine.config.settings import EngineConfig
from headrace.engine.core.step import (
    SCHEMA_VERSION,
    StepPlan,
    StepResult,
    decode_plan,
    decode_result,
    encode,
)
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import ModelFiles
from headrace.platforms.device import DeviceInfo


class Setup(msgspec.Struct, tag="setup", kw_only=True):
    """All that a worker must know to begin: everything was found and decided in the parent."""

    config: EngineConfig
    files: ModelFiles
    spec: ModelSpec
    device: DeviceInfo
    rank: int = 0
    world: int = 1
    init_method: str = ""  # rendezvous of the ranks
    schema: int = SCHEMA_VERSION


class Hello(msgspec.Struct, tag="hello"):
    """A worker process's first words."""

    schema: int
    pid: int


class Call(msgspec.Struct, tag="call"):
    call_id: int
    method: str
    args: list[Any] = []


class Close(msgspec.Struct, tag="close"):
    """Finish what was sent before, then end."""


class Progress(msgspec.Struct, tag="progress"):
    phase: str
    done: float
    total: float
    text: str


class Reply(msgspec.Struct, tag="reply"):
    call_id: int
    value: Any = None
    error: str = ""


class Failed(msgspec.Struct, tag="failed"):
    """The worker cannot go on."""

    error: str


ToWorker = Setup | Call | Close
FromWorker = Hello | Progress | Reply | Failed

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_STEP = b"s"
_MESSAGE = b"m"


def pack(message: StepPlan | StepResult | ToWorker | FromWorker) -> bytes:
    if isinstance(message, (StepPlan, StepResult)):
        return _STEP + encode(message)
    return _MESSAGE + _encoder.encode(message)


def unpack_for_worker(data: bytes) -> StepPlan | ToWorker:
    body = memoryview(data)[1:]
    return decode_plan(body) if data[:1] == _STEP else _to_worker.decode(body)


def unpack_from_worker(data: bytes) -> StepResult | FromWorker:
    body = memoryview(data)[1:]
    return decode_result(body) if data[:1] == _STEP else _from_worker.decode(body)
