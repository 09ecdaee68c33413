"""One generating request from body to choices, shared by chat and completions."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.engine.ipc.messages import Submit
from headrace.engine.server.echo import echo_text
from headrace.engine.server.generate import Choice, Context
from headrace.engine.server.params import Generation, room_for
from headrace.engine.server.prompts import Prompt
from headrace.engine.server.state import ServerState
from headrace.engine.server.usage import usage
from headrace.engine.text.output import OutputAssembler
from headrace.engine.text.stops import StopStrings

log = logging.getLogger("headrace.server")


class Head(msgspec.Struct, frozen=True):
    """What every chunk and answer of a request begins with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def make(cls, state: ServerState, prefix: str, object: str, model: str | None) -> Head:
        name = state.names.check(model)
        return cls(
            f"{prefix}-{uuid.uuid4().hex}", object, int(time.time()), name, state.fingerprint
        )

    def fields(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    def chunk_prefix(self) -> bytes:
        """An SSE frame up to and including the choices' opening bracket: the same for every chunk."""
        return b"data: " + msgspec.json.encode(self)[:-1] + b',"choices":['


@dataclass(frozen=True, slots=True)
class Run:
    """A request that has its places and its token ids: ready to generate."""

    state: ServerState
    head: Head
    generation: Generation
    choices: list[Choice]
    context: Context

    def chunk_tail(self) -> bytes:
        """The end of an SSE frame after the choices' elements, running usage included where asked for."""
        if self.generation.continuous_usage:
            counts = msgspec.json.encode(usage(self.choices, self.generation.n))
            return b'],"usage":' + counts + b"}\n\n"
        return b'],"usage":null}\n\n' if self.generation.include_usage else b"]}\n\n"


def start_run(
    state: ServerState,
    head: Head,
    generation: Generation,
    prompts: Sequence[Prompt],
    context: Context,
    param: str,
) -> Run:
    """Every prompt's n choices, in prompt order: index = prompt * n + k. Raises ApiError when a prompt is too long."""
    rooms = [
        room_for(
            len(prompt.ids),
            generation.max_tokens,
            state.limits.context,
            f"{param}[{at}]" if len(prompts) > 1 else param,
        )
        for at, prompt in enumerate(prompts)
    ]
    choices: list[Choice] = []
    stops = StopStrings(generation.stop.strings) if generation.stop.strings else None
    for prompt, room in zip(prompts, rooms, strict=True):
        state.metrics.prompt_tokens.inc(len(prompt.ids))
        state.metrics.prompt_length.observe(len(prompt.ids))
        log.debug("%s: %d prompt tokens, text %.200r", head.id, len(prompt.ids), prompt.text)
        packed = prompt.packed()
        skip = generation.skip_special_tokens
        echo = echo_text(state.tokenizer, prompt, skip) if generation.echo else ""
        for k in range(generation.n):
            index = len(choices)
            assembler = OutputAssembler(
                state.tokenizer,
                generation.sampling,
                stops=stops,
                include_stop=generation.stop.include,
                skip_special_tokens=skip,
                text_offset=len(echo),
            )
            submit = Submit(
                request_id=f"{head.id}-{index}",
                token_ids=packed,
                sampling=generation.for_choice(k, room, state.seeds),
                priority=generation.priority,
                cache_salt=generation.cache_salt,
                arrival=time.monotonic(),
            )
            choices.append(Choice(index, prompt, submit, assembler, echo, k == 0))
    return Run(state, head, generation, choices, context)


def received_at(request: Request) -> float:
    """time.monotonic() when the server saw the request's head."""
    return request.scope["headrace.received"]
