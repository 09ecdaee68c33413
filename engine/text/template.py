"""Chat templates: Jinja as Hugging Face's templates expect it, in a sandbox and within limits.

Templates come with models, so they are treated as foreign code: no attribute that starts with an underscore, nothing
that changes what it was given, a bounded number of loop rounds and a bounded text. What a template may use beyond plain
Jinja: `raise_exception(text)`, `strftime_now(format)`, the `tojson` filter without HTML escapes, `break` and
`continue`, and the `{% generation %}` block, which marks assistant text for training and is transparent here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.engine.text.tokenizer import TemplateError

MAX_CHARS = 32 << 20  # of a rendered prompt: several times what the largest context holds
MAX_ROUNDS = 2_000_000  # of all loops of one rendering
_BUDGET = "_rounds_left"
_NEEDLE = "headraceprobe"


class _Refused(jinja2.TemplateError):
    """raise_exception was called: the template's own words."""


class _Budget:
    """Loop rounds that one rendering may still make."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_ROUNDS

    def spend(self, rounds: int) -> None:
        self._left -= rounds
        if self._left < 0:
            raise jinja2.TemplateError(f"its loops make more than {MAX_ROUNDS:,} rounds")


class _Generation(Extension):
    tags = {"generation"}  # noqa: RUF012  # the base class declares a set

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@jinja2.pass_context
def _counted(context: Any, items: Any) -> Any:
    """Charges a loop's rounds to the rendering; wrapped around the iterable of every `for`."""
    budget = context.get(_BUDGET)
    if budget is None:  # while the compiler folds constants there is no rendering
        return items
    if hasattr(items, "__len__"):
        budget.spend(len(items))
        return items
    return _count_each(budget, items)


def _count_each(budget: _Budget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.spend(1)
        yield item


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.counted = _counted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            counter = nodes.EnvironmentAttribute("counted")
            loop.iter = nodes.Call(counter, [loop.iter], [], None, None, lineno=loop.lineno)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Products and powers that would fill the memory are refused before they are made."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 64:
            raise jinja2.TemplateError(f"the power {right} is too large")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if (
                    hasattr(text, "__len__")
                    and isinstance(times, int)
                    and len(text) * times > MAX_CHARS
                ):
                    raise jinja2.TemplateError("a repetition is too long")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """One compiled template, and what a few trial renderings show of it. Raises TemplateError when it is no Jinja."""

    def __init__(self, source: str):
        self.source = source
        try:
            self._template = _Environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the chat template is no valid Jinja: {error}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt text. Raises TemplateError: the template's own words, or what went wrong in it."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate({**variables, _BUDGET: _Budget()}):
                size += len(piece)
                if size > MAX_CHARS:
                    raise jinja2.TemplateError(f"its text is longer than {MAX_CHARS:,} characters")
                pieces.append(piece)
        except _Refused as error:
            raise TemplateError(str(error)) from None
        except RecursionError:
            raise TemplateError("the chat template failed: it calls itself without end") from None
        except MemoryError:
            raise TemplateError("the chat template failed: it needs too much memory") from None
        except Exception as error:  # a template can raise what Python can
            raise TemplateError(f"the chat template failed: {error}") from None
        return "".join(pieces)

    @cached_property
    def knows_developer(self) -> bool:
        return "developer" in self.source

    @cached_property
    def takes_system(self) -> bool:
        """False when a system message makes it raise or does not appear in the text."""
        shown = self._shows(("system", _NEEDLE), ("user", "x"))
        # a template that cannot take the plain message either says nothing about the system role
        return shown or not self._shows(("user", _NEEDLE))

    @cached_property
    def takes_parts_only(self) -> bool:
        """True when text shows only as a list of content parts, not as a string."""
        return not self._shows(("user", _NEEDLE), parts=False) and self._shows(
            ("user", _NEEDLE), parts=True
        )

    def _shows(self, *messages: tuple[str, str], parts: bool | None = None) -> bool:
        """Whether the needle appears in the rendering of these messages (content as the template takes it)."""
        as_parts = self.takes_parts_only if parts is None else parts
        chat = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
            for role, text in messages
        ]
        names = {"bos_token": "", "eos_token": "", "tools": None, "documents": None}
        try:
            return _NEEDLE in self.render(
                {"messages": chat, "add_generation_prompt": True, **names}
            )
        except TemplateError:
            return False
