"""docs/support.md is what the platforms' verdicts say, and what was run is told with its run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def support():
    spec = importlib.util.spec_from_file_location("support", ROOT / ".ci" / "support.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_page_is_fresh(support):
    stale = "docs/support.md is stale: python .ci/support.py writes it; look at the difference"
    assert support.page() == support.PAGE.read_text(), stale


def test_every_built_in_platform_and_architecture_is_there(support):
    text = support.page()
    names = [platform.name for platform in support.platforms()]
    assert names[0] == "cuda" and names[-1] == "cpu" and len(names) >= 3
    for platform in support.platforms():
        _, _, section = text.partition(f"\n## {platform.name}\n")
        header = section.lstrip().splitlines()[0]
        assert header == f"|  | {' | '.join(platform.known_archs())} |"


def test_bold_needs_a_record(support):
    """What is called run has a line that says where, when and at which commit."""
    records = {(row["platform"], row["arch"]) for row in support.records()}
    assert all(row["when"] and len(row["commit"]) >= 40 for row in support.records())
    for platform in support.platforms():
        table = [row.split(" | ") for row in support.table(platform)]
        for number, arch in enumerate(platform.known_archs(), 1):
            bold = any("**" in row[number] for row in table)
            assert not bold or (platform.name, arch) in records


def test_a_report_of_a_run_is_a_record(support, monkeypatch, tmp_path):
    report = (
        '{"command": "conformance", "time": "2027-01-02T03:04:05+00:00", "commit": "%s", "passed": 9, '
        '"failed": 0, "skipped": 1, "device": {"platform": "cpu", "arch": "neon", "name": "an Arm CPU"}}'
    )
    (tmp_path / "run.json").write_text(report % ("a" * 40))
    (tmp_path / "other.json").write_text('{"command": "bench"}')
    monkeypatch.setattr(support, "REPORTS", tmp_path)
    (row,) = (row for row in support.records() if row["arch"] == "neon")
    assert (row["where"], row["when"]) == ("an Arm CPU", "2027-01-02")
    assert "9 cases passed" in row["what"]
    cpu = support.platforms()[-1]
    column = 1 + list(cpu.known_archs()).index("neon")

    def cells() -> list[str]:
        return [row.split(" | ")[column] for row in support.table(cpu)]

    assert "**torch**" in cells()
    (tmp_path / "run.json").write_text(report.replace('"failed": 0', '"failed": 1') % ("a" * 40))
    assert "**torch**" not in cells()
