"""What the parent and the process that computes say to each other: JSON lines. Torch-free."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.platforms.device import DeviceInfo

Status = Literal["passed", "failed", "skipped"]

# Areas of the run that are no op.
MEMORY, GRAPHS, COLLECTIVES, MODEL = "memory", "graphs", "collectives", "model"
AREAS = (MEMORY, GRAPHS, COLLECTIVES, MODEL)


class Test(msgspec.Struct, frozen=True):
    """One thing to be done, in the order of the run. `implementation` is "" where the device itself is looked at."""

    area: str  # an op, or one of AREAS
    implementation: str
    text: str  # the query, the check, the model


class Case(msgspec.Struct, frozen=True):
    name: str
    excess: float  # largest error as a multiple of the tolerance; more than 1 fails; -1 = there is no number
    text: str = ""  # why it failed

    @property
    def passed(self) -> bool:
        return not self.text


class Result(msgspec.Struct):
    """What became of a test. A skipped one has no cases and says why."""

    status: Status
    text: str = ""
    cases: list[Case] = []
    seconds: float = 0.0


class Job(msgspec.Struct, tag="job"):
    """To the child, on its standard input."""

    device: DeviceInfo
    devices: list[DeviceInfo]
    only: list[str]  # "op", "op=implementation" or an area; [] = everything
    start: int  # number of the first test to do
    path: list[str]  # sys.path, so that it finds the same plugins


class Tests(msgspec.Struct, tag="tests"):
    """First message of a child: all tests, those before `start` included."""

    tests: list[Test]


class Started(msgspec.Struct, tag="started"):
    """A test, or the next case of it, begins. What is silent after this for too long hangs in it."""

    number: int
    case: str = ""


class Done(msgspec.Struct, tag="done"):
    number: int
    result: Result


class Over(msgspec.Struct, tag="over"):
    """The child has come to its end. `next_test`: where another one has to go on, -1 = nowhere."""

    next_test: int = -1


Message = Tests | Started | Done | Over
decode = msgspec.json.Decoder(Message).decode
