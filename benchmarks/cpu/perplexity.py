"""Perplexity of the quantized models against llama.cpp's, of the same files on the same text.

    python -m benchmarks.cpu.perplexity                  # about five minutes on two quiet cores
    python -m benchmarks.cpu.perplexity --bytes 20000    # a fifth of it

Both cut the text into windows of 512 tokens that do not overlap, put the beginning-of-sequence token first where the
model has one, and score the second half of each window but for its first token (llama-perplexity's own way). The text
is one that every Python brings, its language reference, so that nobody has to fetch anything; --text names another.
Bar: the two differ by at most half a percent. `--exact` adds what the file's weights give when nothing is rounded, so
that one sees which of the two is nearer to it. The standard error of each is that of the text's sample; it does not
bound the difference, since both score the same tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pydoc_data.topics
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cpu.places import Places
from benchmarks.cpu.servers import cores
from headrace.cli.bench.record import record, write_json

RESULTS = Path(__file__).parents[1] / "results/cpu-perplexity.json"
CONTEXT = 512
BAR_PERCENT = 0.5
ESTIMATE = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")


def reference_text(size: int) -> str:
    """The first `size` characters of Python's language reference, as the running Python carries it."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))[:size]


def headrace(model: Path, text: Path, *options: str) -> tuple[float, float]:
    """(perplexity, standard error)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "perplexity.json")
        command = [sys.executable, "-m", "headrace.cli.main", "bench", "perplexity", str(model)]
        command += [str(text), "--context", str(CONTEXT), "--stride", str(CONTEXT), *options]
        subprocess.run([*command, "--json", str(file)], check=True)
        found = json.loads(file.read_text())["results"][0]
    return float(found["perplexity"]), float(found["error"])


def llama(binary: Path, model: Path, text: Path) -> tuple[float, float]:
    """(perplexity, standard error)."""
    command = [
        str(binary),
        "-m",
        str(model),
        "-f",
        str(text),
        "-c",
        str(CONTEXT),
        "-t",
        str(cores()),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    found = ESTIMATE.search(done.stdout + done.stderr)
    if not found:
        sys.exit(f"llama-perplexity gave no estimate:\n{(done.stdout + done.stderr)[-2000:]}")
    return float(found[1]), float(found[2])


def compare(name: str, model: Path, text: Path, binary: Path, exact: bool) -> dict[str, Any]:
    own, own_error = headrace(model, text)
    other, other_error = llama(binary, model, text)
    differs = (own / other - 1) * 100
    truth = {"float32": headrace(model, text, "--dtype", "float32")[0]} if exact else {}
    return {
        **truth,
        "model": name,
        "headrace": own,
        "headrace_error": own_error,
        "llama.cpp": other,
        "llama.cpp_error": other_error,
        "differs_percent": differs,
        "bar_percent": BAR_PERCENT,
        "met": abs(differs) <= BAR_PERCENT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    Places.add_arguments(parser)
    parser.add_argument("--text", type=Path, help="a text file instead of the built-in one")
    parser.add_argument("--bytes", type=int, default=100_000, help="so much of the text")
    parser.add_argument(
        "--exact", action="store_true", help="also with the file's weights dequantized to float32"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    places = Places.of(options)
    binary = places.llama("llama-perplexity")
    if not binary:
        sys.exit("llama-perplexity is not built: python -m benchmarks.cpu.install llama.cpp")
    whole = options.text.read_text() if options.text else reference_text(options.bytes)
    content = whole[: options.bytes]
    models = {"SmolLM2-135M Q4_1": places.smollm2, "Gemma 3 270M Q4_K_M": places.gemma3}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text(content)
        rows = [compare(name, model, text, binary, options.exact) for name, model in models.items()]
    table = Table("model", "headrace", "llama.cpp", "differs", "bar", "float32")
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['headrace']:.4f}",
            f"{row['llama.cpp']:.4f}",
            f"{row['differs_percent']:+.3f} %",
            f"at most {BAR_PERCENT} %: {'met' if row['met'] else 'MISSED'}",
            f"{row['float32']:.4f}" if "float32" in row else "",
        )
    Console().print(table)
    arguments = {
        "text": options.text.name if options.text else "pydoc_data.topics",
        "bytes": len(content.encode()),
        "sha256": hashlib.sha256(content.encode()).hexdigest(),
        "context": CONTEXT,
    }
    data = record("cpu-perplexity", arguments, rows)
    data["versions"] |= places.versions()
    write_json(str(options.json), data)


if __name__ == "__main__":
    main()
