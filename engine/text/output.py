"""OutputAssembler: a choice's engine outputs to what the client sees. Pure; one for each choice.

For the server:

    assembler = OutputAssembler(tokenizer, sampling, stops=StopStrings(stop), ...)
    async for output in engine.generate(submit):
        delta = assembler.push(output)
        ... delta.text, delta.tokens ...
        if delta.finish_reason:
            break        # leaving the iterator aborts the request where the engine has not ended it itself

Stream and non-stream answers are made from the same deltas, so they are equal by construction. All text passes here
once, withheld text included, so parsers behind it (reasoning, tool calls) see the same text in both modes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.engine.core.sampling import SamplingParams
from headrace.engine.core.step import TokenLogprobs
from headrace.engine.ipc.messages import RequestOutput
from headrace.engine.text.detokenizer import Detokenizer
from headrace.engine.text.stops import StopMatch, StopScanner, StopStrings
from headrace.engine.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


class TopToken(msgspec.Struct, frozen=True):
    token_id: int
    text: str
    data: bytes | None
    logprob: float


class ShownToken(msgspec.Struct, frozen=True):
    """One token of the text shown, for logprobs.

    `data` are its bytes: joined over tokens they are the UTF-8 of the content (`text` may hold U+FFFD where a
    character spans tokens). A special token that is not shown has its mark as `text` and None as `data`.
    `offset`: characters of the text before it. `logprob` is None for the first token of a prompt.
    """

    token_id: int
    text: str
    data: bytes | None
    logprob: float | None
    top: list[TopToken]
    offset: int


class OutputDelta(msgspec.Struct):
    """What one engine output adds. `finish_reason` is None until the choice has ended."""

    text: str = ""
    tokens: list[ShownToken] = []  # when logprobs were asked for; those whose text is out
    finish_reason: str | None = None  # stop | length | abort | error
    # the stop string or the stop token that ended it; None at the model's own end and otherwise
    stop_reason: str | int | None = None
    completion_tokens: int = 0  # so far: tokens generated up to the end, the stop token included


class _Waiting(msgspec.Struct):
    token: ShownToken
    start: int  # characters of the decoded text before it
    end: int  # and up to its end


class OutputAssembler:
    """`stops`: the request's stop strings, not searched in the text of the first `sampling.min_tokens` tokens.

    `include_stop`: the stop string that ended the text is shown. `text_offset` is added to the tokens' offsets (the
    length of an echoed prompt).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        text_offset: int = 0,
    ):
        self._tokenizer = tokenizer
        self._hidden = frozenset(sampling.hidden_stop_ids)
        self._silent_ends = frozenset(tokenizer.eos_token_ids)
        self._min_tokens = sampling.min_tokens
        self._want_tokens = sampling.logprobs >= 0
        self._include_stop = include_stop
        self._skip_special = skip_special_tokens
        self._base = text_offset
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._scanner = StopScanner(stops) if stops else None
        self._waiting: list[_Waiting] = []
        self._decoded = 0  # characters that came out of the detokenizer
        self._shown = 0  # and were handed out
        self.completion_tokens = 0
        self.finished = False

    def push(self, output: RequestOutput) -> OutputDelta:
        """Takes the next engine output. After a delta with a finish_reason further ones are empty."""
        if self.finished:
            return OutputDelta(completion_tokens=self.completion_tokens)
        ids = output.token_ids
        last = len(ids) - 1 if self._ends_hidden(output) else len(ids)
        if self._scanner is None and not self._want_tokens:
            text = self._detokenizer.push(ids[:last] if last < len(ids) else ids)
            self.completion_tokens += len(ids)
            return self._close(output, [text])
        pieces: list[str] = []
        for index in range(last):
            self.completion_tokens += 1
            logprobs = output.logprobs[index] if index < len(output.logprobs) else None
            match = self._take(ids[index], logprobs, pieces)
            if match is not None:
                return self._stopped(match, pieces)
        self.completion_tokens += len(ids) - last
        return self._close(output, pieces)

    def _ends_hidden(self, output: RequestOutput) -> bool:
        ids = output.token_ids
        return bool(ids) and output.finish_reason == "stop" and ids[-1] in self._hidden

    def _take(
        self, token_id: int, logprobs: TokenLogprobs | None, pieces: list[str]
    ) -> StopMatch | None:
        """Text of one token: released text goes to `pieces`."""
        start = self._decoded
        text = self._detokenizer.push_one(token_id)
        self._decoded += len(text)
        if self._want_tokens and logprobs is not None:
            # a character in the making counts: the token waits until it is out
            end = self._decoded + bool(self._detokenizer.pending)
            token = self._shown_token(logprobs, self._base + start)
            self._waiting.append(_Waiting(token, start, end))
        if self._scanner is None or self.completion_tokens <= self._min_tokens:
            pieces.append(text)
            return None
        found = self._scanner.push(text)
        if isinstance(found, StopMatch):
            return found
        pieces.append(found)
        return None

    def _stopped(self, match: StopMatch, pieces: list[str]) -> OutputDelta:
        pieces.append(match.text)
        if self._include_stop:
            pieces.append(match.stop)
        text = "".join(pieces)
        self._shown += len(text)
        kept = [w for w in self._waiting if w.start < self._shown or w.end <= self._shown]
        return self._finish(text, kept, "stop", match.stop)

    def _close(self, output: RequestOutput, pieces: list[str]) -> OutputDelta:
        """The delta where no stop string was found; at the engine's end what was withheld comes out."""
        if output.finish_reason:
            tail = self._detokenizer.flush()
            if self._scanner is not None:
                found = self._scanner.push(tail) if tail else ""
                if isinstance(found, StopMatch):
                    return self._stopped(found, pieces)
                tail = found + self._scanner.flush()
            pieces.append(tail)
        text = "".join(pieces)
        self._shown += len(text)
        if output.finish_reason:
            stop = output.stop_token_id
            named = stop >= 0 and stop not in self._silent_ends
            return self._finish(text, self._waiting, output.finish_reason, stop if named else None)
        tokens = self._released() if self._waiting else []
        return OutputDelta(text, tokens, completion_tokens=self.completion_tokens)

    def _finish(
        self, text: str, kept: Sequence[_Waiting], reason: str, stop: str | int | None
    ) -> OutputDelta:
        self.finished = True
        self._waiting = []
        return OutputDelta(text, [w.token for w in kept], reason, stop, self.completion_tokens)

    def _released(self) -> list[ShownToken]:
        """Waiting tokens whose text is out, in order."""
        count = 0
        for entry in self._waiting:
            if entry.end > self._shown:
                break
            count += 1
        tokens = [w.token for w in self._waiting[:count]]
        del self._waiting[:count]
        return tokens

    def _shown_token(self, logprobs: TokenLogprobs, offset: int) -> ShownToken:
        return shown_token(self._tokenizer, logprobs, offset, self._skip_special)


def shown_token(
    tokenizer: Tokenizer, logprobs: TokenLogprobs, offset: int, skip_special_tokens: bool = True
) -> ShownToken:
    """The token at a position with its likeliest rivals, as text and bytes."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
    top = [
        TopToken(i, tokenizer.token_text(i), _data(tokenizer, i, skipped), max(p, MIN_LOGPROB))
        for i, p in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    ]
    token_id = logprobs.token_id
    return ShownToken(
        token_id,
        tokenizer.token_text(token_id),
        _data(tokenizer, token_id, skipped),
        max(logprobs.logprob, MIN_LOGPROB),
        top,
        offset,
    )


def _data(tokenizer: Tokenizer, token_id: int, skipped: frozenset[int]) -> bytes | None:
    return None if token_id in skipped else tokenizer.token_bytes(token_id)


def echo_prompt(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] = (),
    skip_special_tokens: bool = True,
) -> tuple[str, list[ShownToken]]:
    """The text of a prompt, and one entry a token when `logprobs` are given (for the tokens from the second on).

    The first token has no logprob: nothing stands before it.
    """
    detokenizer = Detokenizer(tokenizer, skip_special_tokens, start_of_text=True)
    if not logprobs:
        return detokenizer.push(token_ids) + detokenizer.flush(), []
    pieces: list[str] = []
    tokens: list[ShownToken] = []
    offset = 0
    for index, token_id in enumerate(token_ids):
        if index == 0:
            first = TokenLogprobs(token_id, 0.0, 0, [], [])
            shown = shown_token(tokenizer, first, 0, skip_special_tokens)
            tokens.append(msgspec.structs.replace(shown, logprob=None))
        elif index <= len(logprobs):
            tokens.append(shown_token(tokenizer, logprobs[index - 1], offset, skip_special_tokens))
        pieces.append(detokenizer.push_one(token_id))
        offset += len(pieces[-1])
    pieces.append(detokenizer.flush())
    return "".join(pieces), tokens
