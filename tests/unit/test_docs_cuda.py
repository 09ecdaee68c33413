"""The CUDA tables are what the results say: python -m benchmarks.cuda.plot makes them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def plot():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("benchmarks.cuda.plot")


def record(time: str, commit: str, *results: dict) -> dict:
    machine = {"device": {"name": "NVIDIA H200"}}
    return {"time": time, "commit": commit, "machine": machine, "results": list(results)}


def rate(model: str, level: str, value: float) -> dict:
    return {"model": model, "level": level, "output_tokens_per_s": value}


@pytest.fixture
def files(plot, tmp_path):
    first = record(
        "2026-01-01",
        "a" * 40,
        rate("llama-3.1-8b", plot.SOME, 3200.0),
        {"model": "llama-3.1-8b", "level": plot.ONE, "tpot_ms": {"p50": 4.0}},
    )
    later = record("2026-02-01", "b" * 40 + "+", rate("llama-3.1-8b", plot.SOME, 3000.0))
    made = []
    for number, one in enumerate((later, first)):
        made.append(tmp_path / f"{number}.json")
        made[-1].write_text(json.dumps(one))
    return made


def test_the_newest_result_of_a_load_counts(plot, files):
    results, records = plot.newest(files)
    assert results["llama-3.1-8b", plot.SOME]["output_tokens_per_s"] == 3000.0
    assert [record["commit"][0] for record in records] == ["a", "b"]
    results, records = plot.newest(files[:1])
    assert list(results) == [("llama-3.1-8b", plot.SOME)] and len(records) == 1


def test_goals_are_met_from_below_or_above(plot, files):
    results, records = plot.newest(files[1:])
    peer = {("llama-3.1-8b", plot.SOME): rate("llama-3.1-8b", plot.SOME, 1600.0)}
    slow, fast = plot.figures(results, peer)
    assert (slow.row.key, slow.verdict, slow.ratio) == (plot.TPOT, "**missed**", None)
    assert (fast.row.key, fast.verdict, fast.ratio) == (plot.RATE, "met", 2.0)
    text = plot.table([slow, fast], records)
    assert (
        "| Llama 3.1 8B, 32 streams, 1,024 in, 128 out, output tok/s | 3,200 | 1,600 (2.00) |"
        in text
    )
    drawn = plot.svg([slow, fast], records)
    assert (
        drawn.count("<rect") == 1 + 3 and drawn.count(">goal<") == 2 and drawn.count(">limit<") == 1
    )


def test_only_what_stands_between_the_lines_is_replaced(plot):
    text = f"a\n{plot.BEGIN}\nold\n{plot.END}\nb\n"
    assert plot.between(text, "new\n") == f"a\n{plot.BEGIN}\nnew\n{plot.END}\nb\n"
    with pytest.raises(ValueError, match="no lines"):
        plot.between("a\n", "new\n")


def test_the_tables_are_up_to_date(plot, tmp_path, monkeypatch):
    copies = []
    for number, file in enumerate(plot.READMES):
        copies.append(tmp_path / f"{number}.md")
        copies[-1].write_text(file.read_text())
    arguments = ["plot", "--out", str(tmp_path), "--readme", *map(str, copies)]
    monkeypatch.setattr("sys.argv", arguments)
    plot.main()
    kept = [plot.DOCS / "cuda-h200.md", plot.DOCS / "cuda-h200.svg", *plot.READMES]
    made = [tmp_path / "cuda-h200.md", tmp_path / "cuda-h200.svg", *copies]
    for old, new in zip(kept, made, strict=True):
        assert old.read_text() == new.read_text(), f"{old}: run python -m benchmarks.cuda.plot"
