"""Frozen settings of one server. Plain data: torch-free, msgspec-encodable, passed whole to the engine process.

How they come to be (defaults < YAML < flags, platform defaults with reasons) is resolve.py's business; every value
that was not the built-in default has an entry in `EngineConfig.provenance`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class ModelSettings(msgspec.Struct, frozen=True):
    model: str = "demo"  # folder, .gguf file, hub repository id, "demo"
    revision: str = ""
    tokenizer: str = ""  # "" = the model's own
    chat_template: str = ""  # path or text; "" = the model's own
    load_format: str = "auto"  # auto | safetensors | gguf | pt | dummy
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    # Quantized files: blocks = compute with them where there are kernels, dequantized = in dtype;
    # auto = blocks, unless another dtype than the device's own is asked for
    weights: str = "auto"
    quantization: str = ""  # "" | int8 | q4: what float matrices become at load
    max_model_len: int = 0  # tokens; 0 = the model's context, or what fits the memory
    offline: bool = False
    download_dir: str = ""
    packed_cache: bool = False  # keep matrices as the kernels want them on disk, for the next start
    hf_overrides: dict[str, Any] = {}
    generation_defaults: bool = (
        True  # take temperature, top_p, ... defaults from generation_config.json
    )


class DeviceSettings(msgspec.Struct, frozen=True):
    device: str = "auto"  # auto | cpu | cuda | cuda:1 | ...
    tensor_parallel_size: int = 1
    threads: int = (
        0  # CPU compute threads of a worker; 0 = its share of the cores within affinity and cgroup
    )
    force: dict[str, str] = {}  # op -> implementation
    disable: tuple[str, ...] = ()
    only_verified: bool = False
    self_test: bool = True
    worker: str = "auto"  # auto | inproc | process
    distributed_init: str = ""  # rendezvous for tensor parallelism; "" = a private file


class CacheSettings(msgspec.Struct, frozen=True):
    block_size: int = 0  # tokens; 0 = what the chosen implementations prefer
    kv_cache_memory: int = 0  # bytes; 0 = from memory_utilization
    memory_utilization: float = 0.9  # of the memory that is really free at start
    kv_cache_dtype: str = "auto"  # auto = the compute dtype
    num_blocks: int = 0  # exact number of blocks of the full group (tests); 0 = from memory
    prefix_caching: bool = True
    sleep_mode: bool = False  # memory is taken so that POST /sleep can give it back


class SchedulerSettings(msgspec.Struct, frozen=True):
    max_num_seqs: int = 256  # running requests
    max_num_batched_tokens: int = 0  # tokens a step (chunk size); 0 = the platform's default
    max_num_mixed_tokens: int = 0  # a step with prompts beside decodes; 0 = no other limit
    policy: str = "fcfs"  # fcfs | priority
    overlap: bool = True
    max_waiting: int = 1024  # requests in the queue beyond the running ones; 0 = no limit


class ServerSettings(msgspec.Struct, frozen=True):
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str = ""
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    root_path: str = ""
    cors_origins: tuple[str, ...] = ("*",)
    max_body_bytes: int = 32 << 20
    max_n: int = 128
    max_logprobs: int = 20
    max_stop: int = 16
    max_stop_bytes: int = 1024
    max_nesting: int = 64
    drain_seconds: float = 30.0
    log_level: str = "info"
    log_requests: bool = False
    # of the sequence of seeds for requests that give none; None = unforeseeable
    seed: int | None = None
    response_role: str = "assistant"
    trust_request_chat_template: bool = False  # a request may bring its own (sandboxed) template


class GraphSettings(msgspec.Struct, frozen=True):
    """Steps that are captured once and replayed without Python between their kernels."""

    eager: bool = False  # none
    sizes: tuple[int, ...] = ()  # requests of the decodes that are captured; () = by max_num_seqs
    largest: int = 0  # no decodes of more requests; 0 = no limit
    prompt: int = 512  # tokens of the longest step of one prompt; 0 = no prompts


PLATFORM = "platform "  # what the `source` of a platform's proposals begins with


class Provenance(msgspec.Struct, frozen=True):
    """Who set a value: "flag --max-model-len", "file config.yaml", "platform cpu", and why."""

    path: str
    value: Any
    source: str
    reason: str = ""


class EngineConfig(msgspec.Struct, frozen=True):
    model: ModelSettings = ModelSettings()
    device: DeviceSettings = DeviceSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    server: ServerSettings = ServerSettings()
    graphs: GraphSettings = GraphSettings()
    provenance: tuple[Provenance, ...] = ()

    def source_of(self, path: str) -> Provenance | None:
        """Who set a value; None for a built-in default."""
        return next((row for row in reversed(self.provenance) if row.path == path), None)

    def proposed(self, path: str) -> bool:
        """Whether a value is a platform's proposal, which may give way where a user's wish may not."""
        row = self.source_of(path)
        return row is not None and row.source.startswith(PLATFORM)
