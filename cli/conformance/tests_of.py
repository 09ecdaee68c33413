"""All tests of a device, and how each is done. Only the process that computes imports this."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.cli.conformance.local_engine import LocalEngine, greedy
from headrace.cli.conformance.messages import (
    COLLECTIVES,
    GRAPHS,
    MEMORY,
    MODEL,
    Case,
    Result,
    Test,
)
from headrace.cli.conformance.models import (
    CHUNK,
    FAMILIES,
    NEW_TOKENS,
    Truth,
    check_answers,
    make_model,
    prompts,
    served_by,
)
from headrace.cli.conformance.ranks import run_group
from headrace.cli.explain import describe_query
from headrace.platforms.device import DeviceInfo, DeviceRuntime
from headrace.platforms.ops import CONTRACTS, Ops
from headrace.platforms.platform import Platform
from headrace.platforms.probe import load_platform
from headrace.platforms.queries import GroupQuery
from headrace.platforms.reference.checks import attention, experts, runtime, sampling
from headrace.platforms.reference.checks.base import Make, NothingToCheck, OpCheck
from headrace.platforms.reference.compare import cases_of, measure, tolerance_of, truth_query
from headrace.platforms.reference.queries import DTYPES, queries
from headrace.platforms.registry import (
    REFERENCE,
    Implementation,
    Policy,
    Registry,
    SelectionError,
    select,
)

HOST = "cpu"
DEFAULT = "as chosen"  # the models' row in which nothing is forced
OP_CHECKS: dict[str, dict[str, OpCheck]] = {
    "paged_attention": attention.CHECKS,
    "fused_experts": experts.CHECKS,
    "sample": sampling.CHECKS,
}
RUNTIME_CHECKS = {
    MEMORY: runtime.MEMORY,
    GRAPHS: runtime.GRAPHS,
    COLLECTIVES: runtime.COLLECTIVES,
}

Say = Callable[[str], None]  # told each case before it runs
Body = Callable[["Bench", Say], Result]


class Bench:
    """The device under test and the CPU beside it, each opened when it is first asked for."""

    def __init__(self, device: DeviceInfo, devices: Sequence[DeviceInfo]) -> None:
        self.device, self.devices = device, devices
        self.platform: Platform = load_platform(device.platform)
        self.registry = Registry.with_reference(self.platform.implementations())
        self.host_device = load_platform(HOST).probe()[0]
        self._runtimes: dict[str, DeviceRuntime] = {}
        self._wanted: dict[tuple[str, Any], list[Any]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-")
        self._truth: Truth | None = None

    @property
    def runtime(self) -> DeviceRuntime:
        if self.device.platform not in self._runtimes:
            self._runtimes[self.device.platform] = self.platform.open(self.device)
        return self._runtimes[self.device.platform]

    @property
    def host(self) -> DeviceRuntime:
        if HOST not in self._runtimes:
            self._runtimes[HOST] = load_platform(HOST).open(self.host_device)
        return self._runtimes[HOST]

    @property
    def truth(self) -> Truth:
        if self._truth is None:
            self._truth = Truth(self.host_device)
        return self._truth

    def bind(self, op: str, name: str, query: Any) -> Any:
        """Exactly that implementation. SelectionError when it cannot serve or cannot be imported."""
        policy = Policy(force={op: name}, self_test=False)
        return Ops(self.registry, self.device, self.runtime, policy).bind(op, query)

    def wanted(self, op: str, query: Any) -> list[Any]:
        """What the reference gives on the CPU, a tuple of tensors for each case; kept for the op's next candidate."""
        if (op, query) not in self._wanted:
            if any(known != op for known, _ in self._wanted):
                self._wanted.clear()
            policy, registry = Policy(force={op: REFERENCE}), Registry.with_reference()
            plain = truth_query(CONTRACTS[op], query)
            truth = Ops(registry, self.host_device, self.host, policy).bind(op, plain)
            cases = cases_of(CONTRACTS[op], query, self.host.device)
            self._wanted[op, query] = [case.run(truth) for case in cases]
        return self._wanted[op, query]

    def folder(self, family: str) -> Path:
        """The family's model, made when it is first asked for."""
        folder = Path(self._folder.name, family.partition(",")[0])
        return folder if folder.exists() else make_model(family, folder)

    def alive(self) -> bool:
        """Whether the device still computes after something went wrong on it."""
        try:
            runtime.every_dtype_computes(self.runtime, self.registry)
        except Exception:  # whatever it is, another process has to go on
            return False
        return True

    def close(self) -> None:
        if self._truth is not None:
            self._truth.close()
        for opened in self._runtimes.values():
            opened.close()
        self._folder.cleanup()


@dataclass(frozen=True, slots=True)
class Planned:
    test: Test
    run: Body


def planned(platform: Platform, only: Sequence[str] = ()) -> list[Planned]:
    """Every test, in an order that is the same in every process. `only`: areas, ops, or op=implementation."""
    registry = Registry.with_reference(platform.implementations())
    found = [*_of_runtime(), *_of_groups(registry), *_of_ops(registry), *_of_models(registry)]
    if not only:
        return found
    return [
        one
        for one in found
        if one.test.area in only or f"{one.test.area}={one.test.implementation}" in only
    ]


def _of_runtime() -> Iterator[Planned]:
    for area, checks in RUNTIME_CHECKS.items():
        for text, check in checks.items():
            yield Planned(Test(area, "", text), partial(_check_runtime, check))


def _of_groups(registry: Registry) -> Iterator[Planned]:
    for row in registry.candidates(COLLECTIVES):
        check = partial(_check_group, row)
        yield Planned(Test(COLLECTIVES, row.name, "a rank on each device"), check)


def _of_ops(registry: Registry) -> Iterator[Planned]:
    for op in CONTRACTS:
        for row in registry.candidates(op):
            for query in queries(op):
                test = Test(op, row.name, describe_query(query))
                yield Planned(test, partial(_compare, row, query))
            for text, check in OP_CHECKS.get(op, {}).items():
                yield Planned(Test(op, row.name, text), partial(_check_op, row, check))


def _of_models(registry: Registry) -> Iterator[Planned]:
    names = sorted({row.name for op in CONTRACTS for row in registry.candidates(op)})
    for name in (DEFAULT, *names):
        for family in FAMILIES:
            yield Planned(Test(MODEL, name, family), partial(_run_model, name, family))


def _compare(row: Implementation, query: Any, bench: Bench, say: Say) -> Result:
    """An implementation on the device against the reference on the CPU, case by case."""
    refused = _refusal(row, query, bench)
    if refused:
        return Result("skipped", refused)
    if row.name == REFERENCE and bench.runtime.device.type == HOST:
        return Result("skipped", "here it is what the others are compared with")
    op, contract = row.op, CONTRACTS[row.op]
    candidate = bench.bind(op, row.name, query)
    tolerance, found = tolerance_of(contract, query), []
    wanted = bench.wanted(op, query)
    for case, want in zip(cases_of(contract, query, bench.runtime.device), wanted, strict=True):
        say(case.name)
        try:
            got = case.run(candidate)
            bench.runtime.synchronize()
            error, excess = measure(got, want, tolerance)
        except Exception as failure:  # whatever a kernel throws is this case's result
            found.append(Case(case.name, -1.0, sentence(failure)))
            if not bench.alive():
                break
            continue
        off = f"largest error {error:.2g}, {excess:.3g} times the tolerance" if excess > 1 else ""
        found.append(Case(case.name, excess, off))
    return _result(found)


def _refusal(row: Implementation, query: Any, bench: Bench) -> str:
    """Why the implementation does not serve the query; "" when it says that it does."""
    policy = Policy(force={row.op: row.name}, self_test=False)
    try:
        select(row.op, query, bench.device, bench.registry, policy)
    except SelectionError as error:
        return "; ".join(r for c in error.candidates if c.name == row.name for r in c.reasons)
    return ""


def _check_op(row: Implementation, check: OpCheck, bench: Bench, say: Say) -> Result:
    """In the first dtype that the implementation serves: one check says the same in all of them."""
    make = Make(partial(bench.bind, row.op, row.name), bench.runtime)
    refused = ""
    for dtype in DTYPES:
        say(dtype)
        try:
            check(make, dtype)
        except SelectionError as error:
            reasons = [r for c in error.candidates if c.name == row.name for r in c.reasons]
            refused = refused or "; ".join(reasons)
            continue
        except NothingToCheck as reason:
            return Result("skipped", str(reason))
        return _result([Case(dtype, -1.0)])
    return Result("skipped", refused)


def _check_runtime(check: runtime.RuntimeCheck, bench: Bench, say: Say) -> Result:
    try:
        check(bench.runtime, bench.registry)
    except NothingToCheck as reason:
        return Result("skipped", str(reason))
    return _result([Case("", -1.0)])


def _check_group(row: Implementation, bench: Bench, say: Say) -> Result:
    """The CPU is shared by two ranks; any other device holds one."""
    devices = list(bench.devices)
    if len(devices) == 1 and bench.runtime.device.type == HOST:
        devices *= 2
    if len(devices) == 1:
        return Result("skipped", "there is one device only")
    refused = _refusal(row, GroupQuery(len(devices)), bench)
    if refused:
        return Result("skipped", refused)
    wrong = run_group(devices, row.name)
    return _result([Case(f"{len(devices)} ranks", -1.0, wrong)])


def _run_model(name: str, family: str, bench: Bench, say: Say) -> Result:
    """A tiny model through the whole engine, in float32 if the implementation serves that, else the next dtype."""
    ops: list[str] = []
    reasons: list[str] = []
    for dtype in dict.fromkeys(
        (*(d for d in DTYPES[:1] if d in bench.device.dtypes), *bench.device.dtypes)
    ):
        if name == DEFAULT:
            break
        ops, why = served_by(name, family, dtype, bench.device, bench.registry)
        reasons += why
        if ops:
            break
    else:
        return Result("skipped", "; ".join(dict.fromkeys(reasons)) or "serves no op of this model")
    folder, found = bench.folder(family), []
    settings = {"dtype": dtype, "force": dict.fromkeys(ops, name), "max_num_batched_tokens": CHUNK}
    say(f"starting in {dtype}")
    with LocalEngine(folder, bench.device, **settings) as engine:
        for turn in ("cold", "cached"):
            say(f"{turn}, {dtype}")
            answers = engine.run(prompts(), greedy(NEW_TOKENS, logprobs=1))
            excess, wrong = check_answers(prompts(), answers, bench.truth, folder, dtype)
            found.append(Case(f"{turn}, {dtype}", excess, wrong))
    return _result(found)


def _result(cases: list[Case]) -> Result:
    wrong = [case for case in cases if not case.passed]
    text = f"{wrong[0].name}: {wrong[0].text}".removeprefix(": ") if wrong else ""
    return Result("failed" if wrong else "passed", text, cases)


def sentence(failure: BaseException) -> str:
    """An exception in one line."""
    said = " ".join(str(failure).split())[:500]
    return said if type(failure).__name__ == "CheckFailed" else f"{type(failure).__name__}: {said}"
