"""What a row of the flag table is, and what is written by a user for one. Data only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
