"""bench tune: what is shown and written for what was measured, and where a start and explain find it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import explain
from headrace.cli.bench import run, tune
from headrace.cli.errors import CliError
from headrace.engine.config import env
from headrace.platforms import tuned
from headrace.platforms.probe import resolve_device
from headrace.platforms.queries import AttentionQuery

# SmolLM2's
QUERY = AttentionQuery(9, 3, 64, 64, "bfloat16", "bfloat16", 0.125)


def outcome(kernel: str, now: float, best: float, options: Any = None, note: str = "") -> Any:
    subject = SimpleNamespace(
        kernel=kernel,
        shape="64 -> 96",
        load="1 token",
        key=f"{kernel} LinearQuery()",
        current={"BLOCK_N": 4},
        candidates=[{}] * 9,
    )
    return SimpleNamespace(subject=subject, now=now, best=best, options=options, tried=7, note=note)


FOUND = [
    outcome("row", 10e-6, 8e-6, {"BLOCK_N": 2, "num_warps": 8}),
    outcome("decode", 5e-6, 5e-6, {}),
    outcome("prefill", 0.0, 0.0, None, "no time left"),
]


def shown(found: list[Any]) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tune.table(found))
    return console.export_text()


def test_the_table_says_what_is_best_and_what_was_not_measured():
    row, decode, prefill = shown(FOUND).splitlines()[3:6]
    assert "10.00" in row and "8.00" in row and "20%" in row and "BLOCK_N 2, num_warps 8" in row
    assert "those in use" in decode and "%" not in decode and "7 of 9" in decode
    assert "no time left" in prefill and "0.00" not in prefill


@pytest.fixture
def measured(monkeypatch, tmp_path, smollm2_gguf):
    """Tunes what is given instead of measuring; returns the model's path."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "tunable", lambda plan, decisions: [("linear", None)])
    monkeypatch.setattr(tune, "measure", lambda *asked: (FOUND, []))
    return str(smollm2_gguf)


def test_a_start_and_explain_find_what_was_written(measured, capsys, tmp_path):
    report = tmp_path / "figures.json"
    run.tune(measured, [], (5.0, ""), str(report))
    assert "the next start on this device takes them" in capsys.readouterr().out
    rows = json.loads(report.read_text())["results"]
    assert [row["kernel"] for row in rows] == ["row", "decode", "prefill"]
    name = resolve_device("cpu").device.name
    path = env.tuned_file(name)
    assert tuned.read(path, name).options == {"row LinearQuery()": {"BLOCK_N": 2, "num_warps": 8}}
    explain.run(measured, [], "", True)
    facts = json.loads(capsys.readouterr().out)
    assert facts["tuned"]["file"] == str(path) and facts["tuned"]["entries"] == 1
    path.write_text("{")
    explain.run(measured, [], "", True)
    facts = json.loads(capsys.readouterr().out)
    assert not facts["tuned"]["file"] and sum(str(path) in text for text in facts["warnings"]) == 1


def contest(rival: str, *took: float, note: str = "") -> Any:
    now = (10e-6, 20e-6) if took else ()
    won = bool(took) and max(took) < 10e-6
    return SimpleNamespace(
        query=QUERY, used="native", rival=rival, requires=(), now=now, took=took, won=won, note=note
    )


def test_the_fastest_implementation_is_written_and_taken(measured, monkeypatch, capsys, tmp_path):
    held = [contest("b", 9e-6, 9e-6), contest("reference", 5e-6, 5e-6), contest("c", 7e-6, 9e-6)]
    held += [contest("d", 1e-6, 2e-5), contest("e", note="load failed: no module")]
    monkeypatch.setattr(tune, "measure", lambda *asked: (FOUND[1:], held))
    report = tmp_path / "figures.json"
    run.tune(measured, [], (5.0, ""), str(report))
    shown = capsys.readouterr().out
    assert "10.0 / 20.0" in shown and "5.0 / 5.0" in shown and "load failed" in shown
    assert [row.get("won") for row in json.loads(report.read_text())["results"]][2:] == [
        True, True, True, False, False,
    ]  # fmt: skip
    name = resolve_device("cpu").device.name
    options = tuned.read(env.tuned_file(name), name).options
    assert tuned.chosen(options, "paged_attention", QUERY) == "reference"
    explain.run(measured, [], "", True)
    rows = json.loads(capsys.readouterr().out)["ops"]
    (row,) = (row for row in rows if row["op"] == "paged_attention")
    assert row["chosen"] == "reference" and "measured faster on this device" in str(row)


def test_a_file_of_one_s_own(measured, capsys, tmp_path):
    path = tmp_path / "own.json"
    run.tune(measured, [], (5.0, str(path)), "")
    assert path.exists() and "in the cache folder" in capsys.readouterr().out
    with pytest.raises(CliError, match="name a file with --output"):
        run.tune(measured, [], (5.0, "/dev/null/own.json"), "")


def test_nothing_better_writes_nothing(measured, monkeypatch, capsys):
    monkeypatch.setattr(tune, "measure", lambda *asked: (FOUND[1:], []))
    run.tune(measured, [], (5.0, ""), "")
    assert "nothing was written" in capsys.readouterr().out
    assert not env.cache_dir().exists()
    monkeypatch.setattr(tune, "measure", lambda *asked: (FOUND[2:], []))
    with pytest.raises(CliError, match="no time left"):
        run.tune(measured, [], (5.0, ""), "")


def test_a_device_without_these_kernels(smollm2_gguf):
    with pytest.raises(CliError, match="nothing to tune"):
        run.tune(str(smollm2_gguf), [], (5.0, ""), "")
