"""A scripted engine behind the real server: exact token lists, delays and failures, so that HTTP answers are exact.

The tokenizer knows bytes (ids 0 to 255), BOS 256, EOS 257 and a few words of several characters from 260 on.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from headrace.engine.config.settings import EngineConfig
from headrace.engine.core.step import TokenLogprobs
from headrace.engine.ipc.client import EngineDead
from headrace.engine.ipc.messages import (
    EngineProgress,
    EngineReady,
    RequestOutput,
    Stats,
    Submit,
)
from headrace.engine.server.names import ModelNames
from headrace.engine.server.run import Service
from headrace.engine.server.sockets import bind
from headrace.engine.server.state import ServerState
from headrace.engine.text.tokenizer import TemplateError

BOS, EOS = 256, 257
WORDS = {260: "Hello", 261: " world", 262: "DEF", 263: "G", 264: "HI", 265: "J"}
VOCAB = 300


class ByteTokenizer:
    """One token a byte. `bos=False`: a model without a begin-of-text token."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)
    special_ids = frozenset({BOS, EOS})
    chat_template = "role: content"
    strips_leading_space = False

    def __init__(self, bos: bool = True) -> None:
        self.bos_token_id = BOS if bos else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        start = [BOS] if add_special_tokens and self.bos_token_id is not None else []
        return start + list(text.encode())

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Any]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = (i for i in ids if not (skip_special_tokens and i in self.special_ids))
        return b"".join(self.token_bytes(i) for i in shown).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return {BOS: b"<s>", EOS: b"</s>"}.get(token_id) or WORDS.get(token_id, "").encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def render_chat(self, messages: Any, tools: Any = None, **kwargs: Any) -> str:
        from headrace.engine.text.chat import normalize_messages

        plain = normalize_messages(messages)
        if any(message["role"] == "refused" for message in plain):
            raise TemplateError("no such role")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in plain)
        return text + "assistant: " if kwargs.get("add_generation_prompt") else text


def text_tokens(text: str) -> list[int]:
    return list(text.encode())


@dataclass
class Script:
    """What the engine does with one sequence."""

    tokens: list[int] = field(default_factory=lambda: [*text_tokens("Hello"), EOS])
    delay: float = 0.0  # before every token but the first
    first_delay: float = 0.0
    error_after: int = -1  # tokens, then finish_reason "error"
    die_after: int = -1  # tokens, then the engine is dead
    top: list[tuple[int, float]] = field(default_factory=list)  # alternatives of every token
    logprob: float = -0.5


class ScriptedEngine:
    """An EngineClient. `script` gives each Submit's Script; `slots` sequences run at a time, the others wait."""

    def __init__(
        self,
        script: Callable[[Submit], Script] | Script | None = None,
        context: int = 128,
        slots: int = 64,
        ready: bool = True,
    ) -> None:
        given = script or Script()
        self._script = given if callable(given) else lambda _submit: given
        self._slots = asyncio.Semaphore(slots)
        self._done = asyncio.Event()
        self._context = context
        self.state = "starting"
        self.progress: EngineProgress | None = EngineProgress("load", 3.0, 10.0, "weights")
        self.info: EngineReady | None = None
        self.failure = ""
        self.stats = Stats(kv_total_blocks=100)
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self._unfinished = 0
        self._dead: str = ""
        if ready:
            self.become_ready()

    def become_ready(self) -> None:
        self.info = EngineReady(
            device="cpu",
            device_name="test",
            dtype="float32",
            kv_dtype="float32",
            max_model_len=self._context,
            block_size=16,
            kv_bytes=1,
            kv_tokens=10 * self._context,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            weight_bytes=1,
            world=1,
            selection=[
                {
                    "op": "attention",
                    "chosen": "reference",
                    "candidates": [{"name": "reference", "status": "yes", "rank": 0}],
                }
            ],
            phases={},
        )
        self.state = "ready"
        self._done.set()

    def fail(self, reason: str = "out of memory") -> None:
        self.state, self.failure, self._dead = "failed", reason, reason
        self._done.set()

    async def start(self) -> None: ...

    async def wait_ready(self) -> EngineReady:
        await self._done.wait()
        if self.info is None:
            raise EngineDead(self.failure)
        return self.info

    async def generate(self, submit: Submit) -> AsyncIterator[RequestOutput]:
        self.submits.append(submit)
        self._unfinished += 1
        self.stats.waiting += 1
        started = finished = False
        try:
            async with self._slots:
                self.stats.waiting -= 1
                self.stats.running += 1
                self.stats.kv_used_blocks += 1
                started = True
                async for output in self._outputs(submit, self._script(submit)):
                    finished = bool(output.finish_reason)
                    yield output
        finally:
            self._unfinished -= 1
            if started:
                self.stats.running -= 1
                self.stats.kv_used_blocks -= 1
            else:
                self.stats.waiting -= 1
            if not finished:
                self.aborted.append(submit.request_id)

    async def _outputs(self, submit: Submit, script: Script) -> AsyncIterator[RequestOutput]:
        sampling = submit.sampling
        await asyncio.sleep(script.first_delay)
        if sampling.max_tokens == 0:
            asked = self._prompt_logprobs(submit)
            yield RequestOutput(submit.request_id, prompt_logprobs=asked, finish_reason="length")
            return
        for at, token in enumerate(script.tokens[: sampling.max_tokens]):
            if at and script.delay:
                await asyncio.sleep(script.delay)
            if at == script.die_after or self._dead:
                if not self._dead:
                    self.fail("the worker died")
                raise EngineDead(self._dead)
            if at == script.error_after:
                yield RequestOutput(submit.request_id, finish_reason="error", error="it broke")
                return
            output = RequestOutput(submit.request_id, [token])
            if at == 0:
                output.cached_tokens = 4
                output.queued_s = 0.25
                output.prompt_logprobs = self._prompt_logprobs(submit)
            if sampling.logprobs >= 0:
                output.logprobs = [self._logprobs(token, script, sampling.logprobs)]
            if token in sampling.stop_token_ids:
                output.finish_reason, output.stop_token_id = "stop", token
            elif at + 1 == sampling.max_tokens or at + 1 == len(script.tokens):
                output.finish_reason = "length"
            yield output
            if output.finish_reason:
                return

    def _logprobs(self, token: int, script: Script, k: int) -> TokenLogprobs:
        top = script.top[:k]
        return TokenLogprobs(token, script.logprob, 1, [t for t, _ in top], [v for _, v in top])

    def _prompt_logprobs(self, submit: Submit) -> list[TokenLogprobs]:
        if submit.sampling.prompt_logprobs < 0:
            return []
        ids = np.frombuffer(submit.token_ids, "<i4").tolist()
        return [TokenLogprobs(token, -1.0, 1, [], []) for token in ids[1:]]

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def call(self, method: str, **args: Any) -> Any:
        raise NotImplementedError(method)

    @property
    def unfinished(self) -> int:
        return self._unfinished

    async def close(self) -> None: ...


class Live:
    """A server on a free port, its event loop in a thread."""

    def __init__(self, state: ServerState, engine: ScriptedEngine) -> None:
        self.state = state
        self.engine = engine
        self.exit_code: int | None = None
        self._sock = bind(state.config.server)
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(10)
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=20)

    def _run(self) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._service = Service(self.state, self._sock)
            self._up.set()
            self.exit_code = await self._service.run()

        asyncio.run(main())

    def do(self, action: Callable[[], Any]) -> None:
        """Run something in the server's loop."""
        self._loop.call_soon_threadsafe(action)

    def stop(self) -> None:
        """What a signal does."""
        self.do(self._service.stop)

    def join(self, timeout: float = 20) -> int | None:
        self._thread.join(timeout)
        assert not self._thread.is_alive()
        return self.exit_code

    def close(self) -> None:
        self.http.close()
        if self._thread.is_alive():
            self.stop()
            self.stop()
            self.join()


def make_live(
    engine: ScriptedEngine | None = None,
    config: EngineConfig | None = None,
    tokenizer: ByteTokenizer | None = None,
    model: str = "tiny",
) -> Live:
    import msgspec

    engine = engine or ScriptedEngine()
    config = config or EngineConfig()
    server = msgspec.structs.replace(
        config.server, port=0, drain_seconds=config.server.drain_seconds
    )
    config = msgspec.structs.replace(config, server=server)
    names = ModelNames(model, config.server.served_model_names)
    return Live(ServerState(config, tokenizer or ByteTokenizer(), engine, names), engine)


@contextlib.contextmanager
def live(*args: Any, **kwargs: Any) -> Iterator[Live]:
    server = make_live(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()
