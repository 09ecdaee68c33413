"""The selector: order, force, disable, requirements, load failures, self-tests; the table is always whole."""

from __future__ import annotations

import pytest

from headrace.platforms.device import DeviceInfo
from headrace.platforms.registry import (
    YES,
    Check,
    Implementation,
    Policy,
    Registry,
    Requirement,
    SelectionError,
    SelfTest,
    Verdict,
    policy_problems,
    select,
    unmet,
)

DEVICE = DeviceInfo("test", 0, "a device", "arch", frozenset({"fast"}))


def row(name: str, verdict: Verdict = YES, rank: int = 0, **options) -> Implementation:
    return Implementation(
        "op", name, f"nowhere:{name}", rank, supports=lambda q, d: verdict, **options
    )


DOUBT = Verdict("unverified", ("never run here",))
NO = Verdict("no", ("head size 3",))
PASS = SelfTest(True, "largest error 1e-7")
FAIL = SelfTest(False, "largest error 2")


def choose(*rows: Implementation, policy: Policy | None = None, **hooks):
    registry = Registry([*rows, row("reference", rank=1000)])
    return select("op", "query", DEVICE, registry, policy, **hooks)


def reasons(decision) -> dict[str, str]:
    return {c.name: f"{c.status}: {', '.join(c.reasons)}" for c in decision.candidates}


def test_verified_before_unverified_before_reference():
    rows = [row("a", rank=1), row("b", rank=2), row("c", DOUBT, rank=9), row("d", NO, rank=99)]
    assert choose(*rows).chosen == "b"
    assert choose(rows[2], rows[3], self_test=lambda _: PASS).chosen == "c"
    assert choose(rows[3]).chosen == "reference"


def test_what_was_measured_to_be_faster_comes_first():
    """Above rank and verification; tested like any other; below what is forced and only where it can serve."""
    rows = [row("a", rank=5), row("b", DOUBT, rank=1), row("c", NO)]
    decision = choose(*rows, preferred="b", self_test=lambda _: PASS)
    assert decision.chosen == "b"
    assert reasons(decision)["b"].startswith(
        "unverified: measured faster on this device, never run"
    )
    decision = choose(*rows, preferred="b", self_test=lambda _: FAIL)
    assert decision.chosen == "a" and reasons(decision)["b"].startswith("no: self-test failed")
    assert choose(*rows, preferred="b", policy=Policy(force={"op": "a"})).chosen == "a"
    for policy in (Policy(disable=frozenset({"b"})), Policy(only_verified=True)):
        decision = choose(*rows, preferred="b", policy=policy)
        assert decision.chosen == "a" and "measured" not in reasons(decision)["b"]
    for name in ("c", "gone"):
        assert choose(*rows, preferred=name).chosen == "a"


def test_equal_ranks_keep_the_order_of_registration():
    assert choose(row("a", rank=5), row("b", rank=5)).chosen == "a"


def test_every_candidate_keeps_its_row():
    decision = choose(row("a", rank=1), row("b", NO), row("c", DOUBT), self_test=lambda _: PASS)
    assert reasons(decision) == {
        "a": "yes: ",
        "b": "no: head size 3",
        "c": "unverified: never run here",
        "reference": "yes: ",
    }


def test_self_test_decides_about_the_unverified():
    tested = []

    def self_test(row):
        tested.append(row.name)
        return FAIL if row.name == "best" else PASS

    rows = [row("best", DOUBT, 3), row("next", DOUBT, 2), row("last", DOUBT, 1)]
    decision = choose(*rows, self_test=self_test)
    assert decision.chosen == "next" and tested == ["best", "next"]
    assert reasons(decision)["best"] == "no: self-test failed (largest error 2), never run here"
    assert "self-test passed (largest error 1e-7)" in reasons(decision)["next"]


def test_verified_ones_are_not_tested():
    choose(row("a"), self_test=lambda _: pytest.fail("tested"))


def test_self_test_switched_off():
    policy = Policy(self_test=False)
    decision = choose(row("a", DOUBT), policy=policy, self_test=lambda _: pytest.fail("tested"))
    assert decision.chosen == "a" and "switched off" in reasons(decision)["a"]


def test_only_verified():
    decision = choose(row("a", DOUBT, 5), policy=Policy(only_verified=True))
    assert decision.chosen == "reference"
    assert reasons(decision)["a"].startswith("no: only verified")


def test_disabled_ones_stay_in_the_table():
    rows = [row("a", rank=2), row("b", rank=1)]
    for entry in ("a", "op=a"):
        decision = choose(*rows, policy=Policy(disable=frozenset({entry})))
        assert decision.chosen == "b" and reasons(decision)["a"] == f"no: disabled by {entry!r}"
    assert choose(*rows, policy=Policy(disable=frozenset({"other=a"}))).chosen == "a"


def test_forced_is_honoured():
    rows = [row("a", rank=2), row("b", rank=1), row("c", DOUBT)]
    decision = choose(*rows, policy=Policy(force={"op": "b"}))
    assert decision.chosen == "b" and decision.forced
    assert choose(*rows, policy=Policy(force={"op": "reference"})).chosen == "reference"
    assert choose(*rows, policy=Policy(force={"op": "c"}), self_test=lambda _: PASS).chosen == "c"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d", "head size 3"),
        ("c", "self-test failed"),
        ("zz", "does not exist"),
        ("e", "no such lib"),
    ],
)
def test_forced_is_never_replaced(name, text):
    def load(row):
        if row.name == "e":
            raise ImportError("no such lib")

    rows = [row("a", rank=2), row("c", DOUBT), row("d", NO), row("e")]
    with pytest.raises(SelectionError, match=text) as caught:
        choose(*rows, policy=Policy(force={"op": name}), load=load, self_test=lambda _: FAIL)
    assert [c.name for c in caught.value.candidates] == ["a", "c", "d", "e", "reference"]
    assert "a" in str(caught.value), "the way out names the others"


def test_forced_and_disabled_is_an_error():
    policy = Policy(force={"op": "a"}, disable=frozenset({"a"}))
    with pytest.raises(SelectionError, match="disabled by 'a'"):
        choose(row("a"), policy=policy)


@pytest.mark.parametrize("error", [ImportError("libx.so.1"), OSError("libx.so.1")])
def test_a_load_failure_becomes_a_row_and_the_next_is_taken(error):
    loaded = []

    def load(row):
        loaded.append(row.name)
        if row.name == "a":
            raise error

    decision = choose(row("a", rank=2), row("b", rank=1), load=load)
    assert decision.chosen == "b" and loaded == ["a", "b"]
    assert reasons(decision)["a"] == "no: load failed: libx.so.1"


def test_a_mistake_in_supports_is_a_no():
    def supports(query, device):
        raise KeyError("oops")

    broken = Implementation("op", "broken", "nowhere:x", 5, supports=supports)
    decision = choose(broken)
    assert decision.chosen == "reference" and "oops" in reasons(decision)["broken"]


def test_nothing_can_serve():
    with pytest.raises(SelectionError, match="head size 3") as caught:
        select("op", "query", DEVICE, Registry([row("a", NO)]))
    assert caught.value.candidates[0].status == "no"
    with pytest.raises(SelectionError, match="none is registered"):
        select("other", "query", DEVICE, Registry())


@pytest.mark.parametrize(
    ("requirement", "installed", "text"),
    [
        (Requirement("x"), None, "x is not installed"),
        (Requirement("x", ">=2"), None, "x>=2 is not installed"),
        (Requirement("x", ">=2"), "1.9", "x 1.9 is installed, >=2 is needed"),
        (Requirement("x", ">=1.10,<2"), "1.9", "x 1.9 is installed, >=1.10,<2 is needed"),
        (
            Requirement("x", ">=1.10"),
            "1.10.dev3+cu13",
            "x 1.10.dev3+cu13 is installed, >=1.10 is needed",
        ),
        (Requirement("x", ">=1.10"), "1.11rc1", None),
        (Requirement("x"), "0.0", None),
    ],
)
def test_requirements(requirement, installed, text):
    assert unmet(requirement, lambda name: installed) == text


def test_unmet_requirements_are_reasons():
    needy = row("a", rank=9, requires=(Requirement("x", ">=2"), Requirement("y")))
    decision = choose(needy, versions={"x": "1.0"}.get)
    assert decision.chosen == "reference"
    assert reasons(decision)["a"] == "no: x 1.0 is installed, >=2 is needed, y is not installed"


def test_real_requirements_are_read_from_installed_metadata():
    assert choose(row("a", requires=(Requirement("pytest", ">=1"),))).chosen == "a"
    assert choose(row("a", requires=(Requirement("no-such-thing"),))).chosen == "reference"


def test_policy_problems_name_what_means_nothing():
    registry = Registry([row("a"), row("reference")])
    good = Policy(force={"op": "a"}, disable=frozenset({"a", "op=reference"}))
    assert policy_problems(good, registry) == []
    bad = Policy(force={"op": "b", "po": "a"}, disable=frozenset({"c", "po=a", "op=c"}))
    problems = policy_problems(bad, registry)
    assert len(problems) == 5 and any("op has a, reference" in text for text in problems)


def test_names_are_unique_and_verdicts_explained():
    with pytest.raises(ValueError, match="twice"):
        Registry([row("a"), row("a")])
    for status in ("no", "unverified"):
        with pytest.raises(ValueError, match="reason"):
            Verdict(status)


def test_check_collects_every_need():
    check = Check().need(False, "one").need(True, "two").need(False, "three").doubt("four")
    assert check.verdict() == Verdict("no", ("one", "three"))
    assert Check().doubt("new").note("slow").verdict() == Verdict("unverified", ("new", "slow"))
    assert Check().note("pads").verdict() == Verdict("yes", ("pads",))
