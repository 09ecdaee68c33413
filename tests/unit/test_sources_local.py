"""What a model's name resolves to on this disk; nothing here may ask the network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.engine.config.settings import ModelSettings
from headrace.engine.weights import hub
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.sources import resolve_model


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Going to the hub fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "download", refuse)
    monkeypatch.setattr(hub, "download_tokenizer", refuse)


def gguf_bytes(**split: int) -> bytes:
    """A header with nothing but the split keys."""
    import struct

    out = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(split))
    for key, value in split.items():
        name = f"split.{key}".encode()
        out += struct.pack("<Q", len(name)) + name + struct.pack("<IH", 2, value)
    return out + bytes(64)


def checkpoint(folder: Path, *weights: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name in weights:
        (folder / name).write_bytes(gguf_bytes() if name.endswith(".gguf") else b"x")
    return folder


def resolve(model: str | Path, **kwargs):
    return resolve_model(ModelSettings(model=str(model), **kwargs))


def test_gguf_path_in_every_form(tmp_path, monkeypatch):
    """vllm#23321: an absolute path was taken for a repository id."""
    path = tmp_path / "some" / "m.gguf"
    path.parent.mkdir()
    path.write_bytes(gguf_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(path), "some/m.gguf", "./some/m.gguf", "~/some/m.gguf"):
        files = resolve(name)
        assert files.kind == "gguf"
        assert files.name == name
        assert files.weights == (str(path),)
        assert files.root == str(path.parent)
        assert files.tokenizer_root == str(path)
        assert files.config == ""


@pytest.mark.parametrize(
    "name", ["some/n.gguf", "./n.gguf", "/n.gguf", "~/n.gguf", "some/deep/n.gguf", "n.gguf", "a b"]
)
def test_paths_that_do_not_exist(tmp_path, monkeypatch, name):
    (tmp_path / "some").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ModelError, match="does not exist; give a folder"):
        resolve(name)


def test_a_slip_of_the_pen_gets_a_hint(tmp_path):
    path = tmp_path / "SmolLM2-Q4_1.gguf"
    path.write_bytes(gguf_bytes())
    with pytest.raises(ModelError, match=r"did you mean .*SmolLM2-Q4_1\.gguf\?"):
        resolve(tmp_path / "SmolLM-Q4_1.gguf")


def test_safetensors_before_torch_before_gguf(tmp_path):
    folder = checkpoint(tmp_path / "m", "model.safetensors", "pytorch_model.bin", "m.gguf")
    assert resolve(folder).kind == "safetensors"
    assert resolve(folder, load_format="pt").weights == (str(folder / "pytorch_model.bin"),)
    assert resolve(folder, load_format="gguf").weights == (str(folder / "m.gguf"),)
    (folder / "model.safetensors").unlink()
    assert resolve(folder).kind == "pt"
    (folder / "pytorch_model.bin").unlink()
    assert resolve(folder).kind == "gguf"
    with pytest.raises(ModelError, match=r"holds no weights \(safetensors\)"):
        resolve(folder, load_format="safetensors")


def test_dummy_needs_a_config_alone(tmp_path):
    folder = checkpoint(tmp_path / "m")
    files = resolve(folder, load_format="dummy")
    assert (files.kind, files.weights) == ("dummy", ())
    assert files.config == str(folder / "config.json")


def test_other_files_of_a_checkpoint(tmp_path):
    folder = checkpoint(
        tmp_path / "m", "model.safetensors", "consolidated.safetensors", "training_args.bin"
    )
    (folder / "generation_config.json").write_text("{}")
    files = resolve(folder)
    assert files.weights == (str(folder / "model.safetensors"),)
    assert files.generation_config == str(folder / "generation_config.json")
    assert files.tokenizer_root == files.root == str(folder)


def test_one_file_of_another_name(tmp_path):
    folder = checkpoint(tmp_path / "m", "weights.safetensors")
    assert resolve(folder).weights == (str(folder / "weights.safetensors"),)


def test_index_orders_the_files(tmp_path):
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    folder = checkpoint(tmp_path / "m", *names)
    index = {"weight_map": {"c": names[2], "a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    files = resolve(folder)
    assert [Path(p).name for p in files.weights] == names
    assert files.index == str(folder / "model.safetensors.index.json")


def test_several_ggufs_are_listed(tmp_path):
    folder = checkpoint(tmp_path / "m", "m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-f16.gguf")
    with pytest.raises(ModelError, match=r"several GGUF models.*: m-Q4_0\.gguf, m-Q8_0\.gguf$"):
        resolve(folder)


def test_a_vision_part_beside_the_model_is_left_alone(tmp_path):
    folder = checkpoint(tmp_path / "m", "m-Q4_0.gguf", "mmproj-f16.gguf")
    assert resolve(folder).weights == (str(folder / "m-Q4_0.gguf"),)


def test_split_gguf_in_a_folder(tmp_path):
    parts = [tmp_path / f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for number, part in enumerate(parts):
        part.write_bytes(gguf_bytes(no=number, count=3))
    assert resolve(tmp_path).weights == tuple(str(p) for p in parts)
    assert resolve(parts[0]).weights == tuple(str(p) for p in parts)
    with pytest.raises(ModelError, match=r"part 2 of 3; give the first one: .*m-00001-of-00003"):
        resolve(parts[1])
    parts[0].unlink()
    with pytest.raises(ModelError, match="part 2 of 3"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), r"holds no weights \(\*\.safetensors, pytorch_model\.bin or \*\.gguf\)"),
        (("a.safetensors", "b.safetensors"), r"several weight files \(a.*b.*no model\.safetensors"),
    ],
)
def test_folders_that_are_no_model(tmp_path, files, message):
    with pytest.raises(ModelError, match=message):
        resolve(checkpoint(tmp_path / "m", *files))


def test_no_config(tmp_path):
    folder = checkpoint(tmp_path / "m", "model.safetensors")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(folder)


def test_a_single_weight_file_is_not_a_model(tmp_path):
    folder = checkpoint(tmp_path / "m", "model.safetensors")
    with pytest.raises(ModelError, match="one file of a model; give its folder"):
        resolve(folder / "model.safetensors")


def test_formats_that_do_not_fit(tmp_path):
    folder = checkpoint(tmp_path / "m", "m.gguf")
    with pytest.raises(ModelError, match="read as GGUF, but load format pt"):
        resolve(folder / "m.gguf", load_format="pt")
    with pytest.raises(ModelError, match="load format onnx is unknown"):
        resolve(folder, load_format="onnx")


def test_own_tokenizer(tmp_path):
    folder = checkpoint(tmp_path / "m", "m.gguf")
    other = tmp_path / "tokenizer"
    other.mkdir()
    with pytest.raises(ModelError, match="has no tokenizer"):
        resolve(folder / "m.gguf", tokenizer=str(other))
    (other / "tokenizer.json").write_text("{}")
    for given in (other, other / "tokenizer.json"):
        files = resolve(folder / "m.gguf", tokenizer=str(given))
        assert files.tokenizer_root == str(other)
    with pytest.raises(ModelError, match="does not exist"):
        resolve(folder / "m.gguf", tokenizer="./absent")


def test_no_model_at_all():
    with pytest.raises(ModelError, match="no model was given"):
        resolve("")


def test_neither_torch_nor_numpy_is_imported():
    """Resolving and reading specs happens in the process that answers HTTP."""
    code = (
        "import sys; import headrace.engine.weights.sources; "
        "print([m for m in ('torch', 'numpy', 'safetensors', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
