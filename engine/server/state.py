"""ServerState: everything the routes share, made once by `serve` (or a test) and carried on the application."""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import dataclass, field
from importlib import metadata
from typing import Literal

from headrace.engine.config.settings import EngineConfig
from headrace.engine.ipc.client import EngineClient
from headrace.engine.metrics.prometheus import ServerMetrics
from headrace.engine.server.admission import Admission
from headrace.engine.server.errors import sentence
from headrace.engine.server.flights import Flights
from headrace.engine.server.names import ModelNames
from headrace.engine.server.params import ModelLimits, SamplingDefaults, Seeds
from headrace.engine.text.pool import TextPool
from headrace.engine.text.tokenizer import Tokenizer

Phase = Literal["starting", "ready", "sleeping", "draining", "failed"]


@dataclass(eq=False)
class ServerState:
    """Settings, collaborators and the few things that change while a server lives."""

    config: EngineConfig
    tokenizer: Tokenizer
    client: EngineClient
    names: ModelNames
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    failure: str = ""  # set when the server itself found the engine gone
    requests: int = 0  # guarded HTTP requests being answered
    flights: Flights = field(default_factory=Flights)

    def __post_init__(self) -> None:
        scheduler = self.config.scheduler
        room = scheduler.max_num_seqs + scheduler.max_waiting
        self.admission = Admission(room if scheduler.max_waiting else 0)
        self.text = TextPool()
        self.seeds = Seeds(self.config.server.seed)
        self.metrics = ServerMetrics(
            self.names.first,
            stats=lambda: self.client.stats,
            selection=lambda: self.client.info.selection if self.client.info else (),
        )

    @property
    def phase(self) -> Phase:
        if self.failure or self.client.state == "failed":
            return "failed"
        if self.draining:
            return "draining"
        return "sleeping" if self.client.stats.sleeping else self.client.state

    @property
    def why_failed(self) -> str:
        return sentence(self.failure or self.client.failure or "the engine has stopped")

    @functools.cached_property
    def limits(self) -> ModelLimits:
        """Known once the engine is ready; routes that need it are closed before."""
        info = self.client.info
        if info is None:
            raise RuntimeError("the engine is not ready")
        context = min(info.max_model_len, info.kv_tokens) if info.kv_tokens else info.max_model_len
        return ModelLimits(self.tokenizer.vocab_size, context, tuple(self.tokenizer.eos_token_ids))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with whatever may change a seeded answer: the release, the model, the device, the dtypes."""
        info = self.client.info
        parts = [version(), self.config.model.model, self.config.model.revision]
        if info is not None:
            parts += [info.device_name, info.dtype, info.kv_dtype, str(info.world)]
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@functools.cache
def version() -> str:
    return metadata.version("headrace")
