"""`headrace chat`: a conversation in the terminal. Ctrl-C stops an answer, Ctrl-D (or /exit) leaves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.cli import signals
from headrace.cli.api import Api
from headrace.cli.errors import CliError
from headrace.cli.session import connect
from headrace.engine.config import parse
from headrace.engine.config.flag import Given
from headrace.engine.config.names import nearest

PROMPT = "> "
# Keeps small models from wandering off into unlikely tokens, whatever temperature the model asks for,
# and from repeating themselves to the end of the context.
START = {"min_p": 0.1, "max_tokens": 1024}

# What /set takes: the API's own names.
SAMPLING: dict[str, Callable[[Any], Any]] = {
    "temperature": parse.number(0.0, 2.0),
    "top_p": parse.number(0.0, 1.0),
    "top_k": parse.integer(-1),
    "min_p": parse.number(0.0, 1.0),
    "max_tokens": parse.integer(1),
    "seed": parse.integer(0),
    "presence_penalty": parse.number(-2.0, 2.0),
    "frequency_penalty": parse.number(-2.0, 2.0),
    "repetition_penalty": parse.number(0.0, above=True),
}

HELP = """\
/reset               forget the conversation
/system TEXT         set the system prompt (and begin again); /system shows it
/set NAME VALUE      {names}
/set NAME            back to the server's default; /set shows what is set
/retry               another answer to the last message
/exit                leave (Ctrl-D too); Ctrl-C stops an answer"""


@dataclass(slots=True)
class Conversation:
    """Messages so far and the sampling that was set. Knows nothing of terminals or servers."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)

    def body(self, model: str) -> dict[str, Any]:
        first = [{"role": "system", "content": self.system}] if self.system else []
        return {"model": model, "messages": [*first, *self.turns], **self.sampling}

    def ask(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Drop a question that got no answer, so that roles keep alternating."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def drop_answer(self) -> bool:
        """Drop the last answer; False when there is none."""
        if self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
            return True
        return False

    def set(self, words: Sequence[str]) -> str:
        """/set: returns what to print. ValueError is one sentence."""
        if not words:
            return "\n".join(f"{name} = {value}" for name, value in self.sampling.items()) or (
                "nothing is set; the server's defaults are used"
            )
        name = words[0].replace("-", "_")
        if name not in SAMPLING:
            guess = nearest(name, SAMPLING)
            hint = f"did you mean {guess}?" if guess else f"there are {', '.join(SAMPLING)}"
            raise ValueError(f"no setting {words[0]}; {hint}")
        if len(words) == 1:
            self.sampling.pop(name, None)
            return f"{name} is the server's default"
        self.sampling[name] = SAMPLING[name](words[1])
        return f"{name} = {self.sampling[name]}"


def run(model: str, url: str, key: str, system: str, given: Sequence[Given]) -> None:
    with connect(model, url, key, given) as (api, name):
        conversation = Conversation(system, sampling=dict(START))
        print(f"{name} at your service. /help lists the commands, Ctrl-D leaves.", file=sys.stderr)
        for line in _lines():
            if not line.strip():
                continue
            if line.startswith("/"):
                if not _command(line, conversation):
                    break
                if not line.startswith("/retry"):
                    continue
            else:
                conversation.ask(line)
            _answer(api, name, conversation)


def _lines() -> Iterator[str]:
    """Lines of the user, with history and editing on a terminal, until the input ends."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits and remembers lines)
    while True:
        try:
            yield input(PROMPT if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            signals.forget()
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)


def _command(line: str, conversation: Conversation) -> bool:
    """Carry out a /command. False: leave."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    say = ""
    if name in ("/exit", "/quit", "/bye"):
        return False
    if name == "/help":
        say = HELP.format(names=", ".join(SAMPLING))
    elif name == "/reset":
        conversation.turns.clear()
        say = "a new conversation"
    elif name == "/system":
        if rest:
            conversation.system = rest
            conversation.turns.clear()
        say = conversation.system or "no system prompt"
    elif name == "/set":
        try:
            say = conversation.set(rest.split())
        except ValueError as error:
            say = str(error)
    elif name == "/retry":
        if not conversation.drop_answer():
            say = "nothing to answer again"
    else:
        say = f"no command {name}; /help lists them"
    if say:
        print(say, file=sys.stderr)
    return True


def _answer(api: Api, model: str, conversation: Conversation) -> None:
    """Stream one answer. An interrupted one is kept as far as it came; a refused question is taken back."""
    if not conversation.turns or conversation.turns[-1]["role"] != "user":
        return
    parts: list[str] = []
    cut = ""
    try:
        with contextlib.closing(
            api.stream("/v1/chat/completions", conversation.body(model))
        ) as events:
            for event in events:
                for choice in event["choices"]:
                    text = choice["delta"].get("content") or ""
                    parts.append(text)
                    print(text, end="", flush=True)
                    if choice.get("finish_reason") == "length":
                        cut = (
                            "(the answer reached the longest length; /set max_tokens N, or /reset)"
                        )
    except KeyboardInterrupt:
        signals.forget()
        cut = "(stopped)"
    except CliError as error:
        cut = str(error)
    print()
    if cut:
        print(cut, file=sys.stderr)
    if any(parts):
        conversation.answered("".join(parts))
    else:
        conversation.take_back()
