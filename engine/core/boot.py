"""Boot: what an engine process is given when it starts, through a pipe that also tells it when its parent is gone."""

from __future__ import annotations

import os

import msgspec

from headrace.engine.config.settings import EngineConfig
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import ModelFiles
from headrace.platforms.device import DeviceInfo

_LENGTH_BYTES = 8


class Boot(msgspec.Struct, frozen=True):
    """Everything was found and decided in the parent."""

    address: str  # ZeroMQ endpoint to bind
    config: EngineConfig
    files: ModelFiles
    device: DeviceInfo
    spec: ModelSpec | None = None  # None: read from the files
    executor: str = ""  # "module:function" instead of the real workers' factory


def write_boot(fd: int, boot: Boot) -> None:
    """The pipe stays open afterwards: its end of file is the parent's death."""
    data = msgspec.msgpack.encode(boot)
    data = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    while data:
        data = data[os.write(fd, data) :]


def read_boot(fd: int) -> Boot:
    """EOFError when the parent died first; msgspec.DecodeError when it is of another version."""
    length = int.from_bytes(_read(fd, _LENGTH_BYTES), "little")
    return msgspec.msgpack.decode(_read(fd, length), type=Boot)


def _read(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(fd, count - len(data))
        if not piece:
            raise EOFError("the parent process ended before it said what to start")
        data += piece
    return data
