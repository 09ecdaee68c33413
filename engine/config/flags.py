"""The one table of what a user can set: name, settings path, parser, help, aliases, example. Torch-free, data only.

The command line, the YAML file, the help texts, the shell completion and the documentation all come from `FLAGS`.
Where the vLLM family and SGLang name the same thing, the vLLM family's name is the main one and SGLang's an alias.
A name that another server knows and this one does not has a row in `NOT_SUPPORTED` with the reason and the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.engine.config import parse
from headrace.engine.config.sizes import parse_size

Parser = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Flag:
    """One row. `parser` turns text or a YAML value into the setting's value; ValueError is one sentence.

    kind: "value" takes one argument; "many" may be repeated (each argument may be a comma list);
    "switch" is --name / --no-name, with `negatives` as further spellings of the negative.
    """

    name: str
    path: str  # "scheduler.max_num_seqs"
    group: str
    help: str
    parser: Parser
    kind: str = "value"
    metavar: str = ""
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    negatives: tuple[str, ...] = ()
    default: str = ""  # shown in the help where the built-in default says little
    example: str = ""

    @property
    def key(self) -> str:
        """The name as a YAML key or Python identifier: "max_num_seqs"."""
        return self.name.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class Given:
    """A value somebody wrote, not parsed yet. `source` says who: "flag --dtype", "file serve.yaml:3 dtype"."""

    flag: Flag
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A name known from other servers that is understood and refused; `reason` says the way out."""

    name: str
    reason: str


MODEL, DEVICE, MEMORY, SCHEDULING, SERVER, LIMITS, LOGGING = (
    "Model",
    "Device",
    "Memory",
    "Scheduling",
    "Server",
    "Limits",
    "Logging",
)
GROUPS = (MODEL, DEVICE, MEMORY, SCHEDULING, SERVER, LIMITS, LOGGING)


def _choice(*values: str, **synonyms: str) -> dict[str, Any]:
    """Keyword arguments of a row whose value is one of `values`; a synonym is another spelling of one."""
    return {
        "parser": parse.choice(values, synonyms),
        "choices": values,
    }


_MODEL_FLAGS = (
    Flag(
        "--model",
        "model.model",
        MODEL,
        "Folder, .gguf file, hub repository id, or demo. The same as the MODEL argument.",
        parse.text,
        aliases=("--model-path",),
        metavar="MODEL",
        example="--model ./Qwen3-0.6B",
    ),
    Flag(
        "--served-model-name",
        "server.served_model_names",
        MODEL,
        "Name in the API. Repeat it (or write a,b) for several; the first is the main one.",
        parse.names,
        kind="many",
        metavar="NAME",
        default="the model's",
        example="--served-model-name chat",
    ),
    Flag(
        "--revision",
        "model.revision",
        MODEL,
        "Branch, tag or commit of a hub model.",
        parse.text,
        metavar="REV",
        example="--revision main",
    ),
    Flag(
        "--tokenizer",
        "model.tokenizer",
        MODEL,
        "Take the tokenizer from this folder, file or hub id.",
        parse.text,
        aliases=("--tokenizer-path",),
        metavar="PATH",
        default="the model's",
        example="--tokenizer ./Qwen3-0.6B",
    ),
    Flag(
        "--chat-template",
        "model.chat_template",
        MODEL,
        "Jinja chat template: a file, or the text itself.",
        parse.text,
        metavar="FILE|TEXT",
        default="the model's",
        example="--chat-template chatml.jinja",
    ),
    Flag(
        "--load-format",
        "model.load_format",
        MODEL,
        "Which weight files to read; dummy makes random weights.",
        **_choice("auto", "safetensors", "gguf", "pt", "dummy"),
        example="--load-format dummy",
    ),
    Flag(
        "--dtype",
        "model.dtype",
        MODEL,
        "Compute type. auto takes what the device does best.",
        **_choice(
            "auto",
            "float32",
            "bfloat16",
            "float16",
            float="float32",
            fp32="float32",
            bf16="bfloat16",
            half="float16",
            fp16="float16",
        ),
        example="--dtype bfloat16",
    ),
    Flag(
        "--max-model-len",
        "model.max_model_len",
        MODEL,
        "Context length in tokens, prompt and answer together.",
        parse.context_length,
        aliases=("--context-length",),
        metavar="SIZE",
        default="the model's, or what fits the memory",
        example="--max-model-len 32k",
    ),
    Flag(
        "--hf-overrides",
        "model.hf_overrides",
        MODEL,
        "JSON merged over the model's config.json.",
        parse.json_object,
        aliases=("--json-model-override-args",),
        metavar="JSON",
        example="""--hf-overrides '{"rope_theta": 1e6}'""",
    ),
    Flag(
        "--generation-config",
        "model.generation_defaults",
        MODEL,
        "Take default temperature, top_p, ... from the model (auto) or the API's (none).",
        parse.mapped({"auto": True, "none": False, "model": True, "openai": False, "vllm": False}),
        choices=("auto", "none"),
        aliases=("--sampling-defaults",),
        default="auto",
        example="--generation-config none",
    ),
    Flag(
        "--offline",
        "model.offline",
        MODEL,
        "Never ask the network; use what is on this disk.",
        parse.boolean,
        kind="switch",
    ),
    Flag(
        "--download-dir",
        "model.download_dir",
        MODEL,
        "Keep downloaded models here.",
        parse.text,
        metavar="DIR",
        default="the hub's cache",
        example="--download-dir /models",
    ),
)

_DEVICE_FLAGS = (
    Flag(
        "--device",
        "device.device",
        DEVICE,
        "Where to run: a platform, or one device of it. See headrace doctor.",
        parse.text,
        metavar="NAME[:INDEX]",
        example="--device cpu",
    ),
    Flag(
        "--tensor-parallel-size",
        "device.tensor_parallel_size",
        DEVICE,
        "Spread the model over this many workers.",
        parse.integer(1),
        aliases=("-tp", "--tp-size", "--tp"),
        metavar="N",
        example="-tp 2",
    ),
    Flag(
        "--threads",
        "device.threads",
        DEVICE,
        "CPU compute threads.",
        parse.integer(0),
        metavar="N",
        default="cores this process may use",
        example="--threads 8",
    ),
    Flag(
        "--force",
        "device.force",
        DEVICE,
        "Use this implementation of an op, or refuse to start. Repeatable; see headrace explain.",
        parse.pairs,
        kind="many",
        metavar="OP=NAME",
        example="--force linear=reference",
    ),
    Flag(
        "--disable",
        "device.disable",
        DEVICE,
        "Never use this implementation. Repeatable.",
        parse.names,
        kind="many",
        metavar="[OP=]NAME",
        example="--disable paged_attention=torch",
    ),
    Flag(
        "--only-verified",
        "device.only_verified",
        DEVICE,
        "Use no implementation that was never run on this hardware.",
        parse.boolean,
        kind="switch",
    ),
    Flag(
        "--self-test",
        "device.self_test",
        DEVICE,
        "Check unverified implementations against the reference at start.",
        parse.boolean,
        kind="switch",
    ),
    Flag(
        "--worker",
        "device.worker",
        DEVICE,
        "Run the model in the engine's process or in processes of its own.",
        **_choice("auto", "inproc", "process"),
    ),
)

_MEMORY_FLAGS = (
    Flag(
        "--kv-cache-memory-bytes",
        "cache.kv_cache_memory",
        MEMORY,
        "Memory of the KV cache.",
        parse_size,
        aliases=("--kv-cache-memory",),
        metavar="SIZE",
        default="by --gpu-memory-utilization",
        example="--kv-cache-memory-bytes 4GiB",
    ),
    Flag(
        "--gpu-memory-utilization",
        "cache.memory_utilization",
        MEMORY,
        "Share of the device's free memory to use (on a CPU: of the free RAM).",
        parse.number(0.0, 1.0, above=True),
        aliases=("--mem-fraction-static", "--memory-utilization", "-gmu"),
        metavar="0..1",
        example="--gpu-memory-utilization 0.8",
    ),
    Flag(
        "--kv-cache-dtype",
        "cache.kv_cache_dtype",
        MEMORY,
        "Storage type of the KV cache; auto is the compute type.",
        **_choice(
            "auto",
            "float32",
            "bfloat16",
            "float16",
            fp32="float32",
            bf16="bfloat16",
            fp16="float16",
        ),
    ),
    Flag(
        "--block-size",
        "cache.block_size",
        MEMORY,
        "Tokens in a KV block.",
        parse.integer(0),
        aliases=("--page-size",),
        metavar="N",
        default="what the chosen attention prefers",
        example="--block-size 32",
    ),
    Flag(
        "--num-gpu-blocks-override",
        "cache.num_blocks",
        MEMORY,
        "Exact number of KV blocks, whatever the memory.",
        parse.integer(0),
        metavar="N",
        default="by memory",
        example="--num-gpu-blocks-override 512",
    ),
    Flag(
        "--enable-prefix-caching",
        "cache.prefix_caching",
        MEMORY,
        "Reuse the KV of prompts that begin alike.",
        parse.boolean,
        kind="switch",
        negatives=("--disable-radix-cache",),
    ),
)

_SCHEDULING_FLAGS = (
    Flag(
        "--max-num-seqs",
        "scheduler.max_num_seqs",
        SCHEDULING,
        "Sequences that run at the same time.",
        parse.integer(1),
        aliases=("--max-running-requests",),
        metavar="N",
        example="--max-num-seqs 64",
    ),
    Flag(
        "--max-num-batched-tokens",
        "scheduler.max_num_batched_tokens",
        SCHEDULING,
        "Tokens in one step; long prompts are cut into chunks of at most this.",
        parse_size,
        aliases=("--chunked-prefill-size",),
        metavar="SIZE",
        default="the platform's",
        example="--max-num-batched-tokens 2k",
    ),
    Flag(
        "--scheduling-policy",
        "scheduler.policy",
        SCHEDULING,
        "First come first served, or by the request's priority.",
        **_choice("fcfs", "priority"),
        aliases=("--schedule-policy",),
    ),
    Flag(
        "--async-scheduling",
        "scheduler.overlap",
        SCHEDULING,
        "Schedule the next step while the device runs this one.",
        parse.boolean,
        kind="switch",
        negatives=("--disable-overlap-schedule",),
    ),
    Flag(
        "--max-queued-requests",
        "scheduler.max_waiting",
        SCHEDULING,
        "Sequences that may wait; more are answered 429. 0 is no limit.",
        parse.integer(0),
        metavar="N",
        example="--max-queued-requests 100",
    ),
)

_SERVER_FLAGS = (
    Flag(
        "--host",
        "server.host",
        SERVER,
        "Address to listen on; 0.0.0.0 is every interface.",
        parse.text,
        metavar="ADDRESS",
        example="--host 0.0.0.0",
    ),
    Flag(
        "--port",
        "server.port",
        SERVER,
        "Port to listen on; 0 takes a free one.",
        parse.integer(0, 65535),
        metavar="PORT",
        example="--port 9000",
    ),
    Flag(
        "--uds",
        "server.uds",
        SERVER,
        "Listen on a Unix socket instead of host and port.",
        parse.text,
        metavar="PATH",
        example="--uds /run/headrace.sock",
    ),
    Flag(
        "--api-key",
        "server.api_keys",
        SERVER,
        "Key that requests must carry. Repeatable.",
        parse.names,
        kind="many",
        metavar="KEY",
        default="none needed",
        example="--api-key secret",
    ),
    Flag(
        "--allowed-origins",
        "server.cors_origins",
        SERVER,
        "Origins that browsers may call from. Repeatable.",
        parse.names,
        kind="many",
        metavar="ORIGIN",
        default="*",
        example="--allowed-origins https://example.org",
    ),
    Flag(
        "--root-path",
        "server.root_path",
        SERVER,
        "Path prefix that a proxy in front strips.",
        parse.text,
        aliases=("--fastapi-root-path",),
        metavar="PATH",
        example="--root-path /llm",
    ),
    Flag(
        "--response-role",
        "server.response_role",
        SERVER,
        "Role of the answers in the chat API.",
        parse.text,
        metavar="ROLE",
    ),
    Flag(
        "--trust-request-chat-template",
        "server.trust_request_chat_template",
        SERVER,
        "Let requests bring their own chat template (sandboxed).",
        parse.boolean,
        kind="switch",
    ),
    Flag(
        "--shutdown-timeout",
        "server.drain_seconds",
        SERVER,
        "On SIGTERM, seconds that running requests get to finish; 0 ends them at once.",
        parse.number(0.0),
        metavar="SECONDS",
        example="--shutdown-timeout 60",
    ),
)

_LIMIT_FLAGS = (
    Flag(
        "--max-logprobs",
        "server.max_logprobs",
        LIMITS,
        "Most alternatives a request may ask for.",
        parse.integer(0),
        metavar="N",
    ),
    Flag(
        "--max-n",
        "server.max_n",
        LIMITS,
        "Most answers (n) of one request.",
        parse.integer(1),
        metavar="N",
    ),
    Flag(
        "--max-body-size",
        "server.max_body_bytes",
        LIMITS,
        "Largest request body.",
        parse_size,
        metavar="SIZE",
        default="32MiB",
        example="--max-body-size 64MiB",
    ),
    Flag(
        "--max-stop",
        "server.max_stop",
        LIMITS,
        "Most stop strings of one request.",
        parse.integer(0),
        metavar="N",
    ),
    Flag(
        "--max-stop-bytes",
        "server.max_stop_bytes",
        LIMITS,
        "Longest stop string in bytes.",
        parse_size,
        metavar="SIZE",
    ),
    Flag(
        "--max-nesting",
        "server.max_nesting",
        LIMITS,
        "Deepest nesting of JSON in a request.",
        parse.integer(1),
        metavar="N",
    ),
)

_LOGGING_FLAGS = (
    Flag(
        "--log-level",
        "server.log_level",
        LOGGING,
        "How much to log; debug also shows tracebacks.",
        **_choice("debug", "info", "warning", "error", critical="error", trace="debug"),
        aliases=("--uvicorn-log-level",),
    ),
    Flag(
        "--enable-log-requests",
        "server.log_requests",
        LOGGING,
        "Log every request.",
        parse.boolean,
        kind="switch",
        aliases=("--log-requests",),
    ),
)

FLAGS: tuple[Flag, ...] = (
    *_MODEL_FLAGS,
    *_DEVICE_FLAGS,
    *_MEMORY_FLAGS,
    *_SCHEDULING_FLAGS,
    *_SERVER_FLAGS,
    *_LIMIT_FLAGS,
    *_LOGGING_FLAGS,
)

# Rows come with the issue that maps every name of the other servers.
NOT_SUPPORTED: tuple[Unsupported, ...] = ()
