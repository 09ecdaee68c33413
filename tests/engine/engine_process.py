"""A real engine process with the scripted executor, for tests: no model, no torch, up in half a second."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np

from headrace.engine.config.settings import (
    CacheSettings,
    EngineConfig,
    ModelSettings,
    SchedulerSettings,
)
from headrace.engine.core.sampling import SamplingParams
from headrace.engine.ipc.launch import EngineProcess, start_engine
from headrace.engine.ipc.messages import RequestOutput, Submit
from headrace.engine.ipc.zmq_client import ZmqEngineClient
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights.source import ModelFiles
from headrace.platforms.device import DeviceInfo
from tests.engine.scripted_executor import Script

FILES = ModelFiles(name="scripted", kind="dummy", root="/", weights=())
DEVICE = DeviceInfo(platform="scripted", index=0, name="Scripted device", arch="none")


def scripted_spec(script: Script, context: int = 512) -> ModelSpec:
    return ModelSpec(
        architecture="scripted",
        layers=len(script.windows),
        hidden=4,
        intermediate=4,
        heads=1,
        kv_heads=1,
        head_dim=4,
        vocab=script.vocab,
        max_position=context,
        norm_eps=1e-5,
    )


def scripted_config(
    script: Script,
    cache: CacheSettings | None = None,
    scheduler: SchedulerSettings | None = None,
    max_model_len: int = 0,
) -> EngineConfig:
    overrides = {"scripted": msgspec.to_builtins(script)}
    return EngineConfig(
        model=ModelSettings(hf_overrides=overrides, max_model_len=max_model_len),
        cache=cache or CacheSettings(num_blocks=200),
        scheduler=scheduler or SchedulerSettings(max_num_seqs=32, max_num_batched_tokens=256),
    )


def launch_scripted(script: Script, config: EngineConfig | None = None) -> EngineProcess:
    config = config or scripted_config(script)
    process = start_engine(
        config,
        DEVICE,
        executor="scripted_executor:make_executor",
        environment={"PYTHONPATH": str(Path(__file__).parent)},
    )
    process.boot(config, FILES, DEVICE, scripted_spec(script))
    return process


@contextlib.asynccontextmanager
async def scripted_engine(
    script: Script, config: EngineConfig | None = None
) -> AsyncIterator[tuple[ZmqEngineClient, EngineProcess]]:
    """A client of a new engine process; both are gone afterwards. Not waited for to be ready."""
    process = launch_scripted(script, config)
    client = ZmqEngineClient(process.address, process)
    await client.start()
    try:
        yield client, process
    finally:
        await client.close()
        if process.wait(10) is None:
            process.kill()
            process.wait()


def submit(name: str, prompt: list[int], **sampling) -> Submit:
    tokens = np.array(prompt, np.int32).tobytes()
    params = SamplingParams(**sampling)
    return Submit(name, tokens, params, arrival=time.monotonic())


async def collect(client: ZmqEngineClient, request: Submit) -> tuple[list[int], RequestOutput]:
    """All tokens of a request and its last output."""
    tokens: list[int] = []
    async for output in client.generate(request):
        tokens += output.token_ids
        last = output
    return tokens, last
