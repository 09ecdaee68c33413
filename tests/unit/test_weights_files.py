"""Safetensors, PyTorch and dummy checkpoints: reads, and every way a shard can be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.engine.weights.layout import tensor_shapes
from headrace.engine.weights.local import files_at
from headrace.engine.weights.source import ModelError
from headrace.engine.weights.sources import open_source, read_spec

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
NAMES = [
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.norm.weight",
]


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 32), (48, 32), (48, 32), (32,)]
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def write_config(folder: Path, **more) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))


def single(folder: Path, **kwargs) -> Path:
    write_config(folder)
    save_file(tensors(**kwargs), folder / "model.safetensors")
    return folder


def sharded(folder: Path, kind: str = "safetensors") -> Path:
    """Two shards with two tensors each, and their index."""
    write_config(folder)
    stem = "model" if kind == "safetensors" else "pytorch_model"
    save = save_file if kind == "safetensors" else torch.save
    every, weight_map = tensors(), {}
    for i, names in enumerate((NAMES[:2], NAMES[2:]), start=1):
        file = f"{stem}-0000{i}-of-00002.{kind}"
        save({name: every[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def check_values(folder: Path) -> None:
    source = open_source(files_at("m", folder))
    every = tensors()
    assert set(source.names()) == set(every)
    for name, whole in every.items():
        handle = source.get(name)
        assert handle.shape == tuple(whole.shape)
        assert handle.scheme == "float32"
        assert torch.equal(handle.read(torch.float32), whole)
        assert torch.equal(handle.read(torch.bfloat16), whole.to(torch.bfloat16))
        part = handle.read(torch.float32, slice(8, 24))
        assert torch.equal(part, whole[8:24]) and part.is_contiguous()
        if whole.ndim > 1:
            part = handle.read(torch.float32, slice(8, 24), slice(16, 32))
            assert torch.equal(part, whole[8:24, 16:32]) and part.is_contiguous()
            assert torch.equal(handle.read(torch.float32, None, slice(3, 5)), whole[:, 3:5])
        assert torch.equal(handle.read(torch.float32), whole)  # once more, after it was released
        with pytest.raises(ModelError, match="not quantized blocks"):
            handle.blocks()
    with pytest.raises(KeyError):
        source.get("lm_head.weight")
    assert source.total_bytes() == sum(t.nbytes for t in every.values())
    source.close()


def test_single_safetensors(tmp_path):
    check_values(single(tmp_path / "m"))


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_sharded(tmp_path, kind):
    check_values(sharded(tmp_path / "m", kind))


def test_numbered_shards_need_no_index(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    check_values(folder)


@pytest.mark.parametrize("new_format", [True, False])
def test_single_torch_file(tmp_path, new_format):
    write_config(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors(), path, _use_new_zipfile_serialization=new_format)
    check_values(tmp_path)


def test_what_was_read_stays_when_the_file_changes(tmp_path):
    folder = single(tmp_path / "m")
    source = open_source(files_at("m", folder))
    kept = source.get(NAMES[0]).read(torch.float32)
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(-2048, 2)
        file.write(bytes(2048))
    assert torch.equal(kept, tensors()[NAMES[0]])


def test_float16_checkpoint_in_other_dtypes(tmp_path):
    """vllm#12794: an fp16 model runs where the device has no fp16."""
    folder = single(tmp_path / "m", dtype=torch.float16)
    files = files_at("m", folder)
    assert read_spec(files).dtype == "float16"  # what is stored, whatever config.json says
    whole = tensors(torch.float16)[NAMES[0]]
    handle = open_source(files).get(NAMES[0])
    assert handle.scheme == "float16"
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(handle.read(dtype), whole.to(dtype))


def test_float64_and_other_tensors(tmp_path):
    write_config(tmp_path)
    odd = {
        "a": torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4),
        "b": torch.arange(3),
        "c": torch.tensor(2.5),
        "d": torch.zeros(0, 4),
    }
    save_file(odd, tmp_path / "model.safetensors")
    source = open_source(files_at("m", tmp_path))
    assert torch.equal(source.get("a").read(torch.float32), odd["a"].float())
    assert torch.equal(source.get("a").read(torch.float64, None, slice(1, 3)), odd["a"][:, 1:3])
    assert source.get("c").read(torch.float32).item() == 2.5
    assert source.get("d").read(torch.float32).shape == (0, 4)
    with pytest.raises(ModelError, match="b is stored as I64"):
        source.get("b")


def test_mixed_dtypes_count_as_the_widest(tmp_path):
    write_config(tmp_path)
    mixed = tensors(torch.bfloat16)
    mixed["model.norm.weight"] = mixed["model.norm.weight"].float()
    save_file(mixed, tmp_path / "model.safetensors")
    assert read_spec(files_at("m", tmp_path)).dtype == "float32"


def test_generation_config_adds_its_ends(tmp_path):
    folder = single(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert read_spec(files_at("m", folder)).eos_token_ids == (2, 9)


def test_overrides_go_over_the_config(tmp_path):
    folder = single(tmp_path / "m")
    scaling = {"rope_type": "linear", "factor": 2.0}
    spec = read_spec(files_at("m", folder), {"rope_scaling": scaling, "rope_theta": 7.0})
    assert spec.ropes[0].scaling == scaling
    assert spec.ropes[0].theta == 7.0
    assert spec.max_position == 256


# Missing, short and wrong shards (vllm#34859, sglang PR#32279): refused before anything is loaded, by name.


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_missing_shards_are_listed(tmp_path, kind):
    folder = sharded(tmp_path / "m", kind)
    shards = sorted(folder.glob(f"*.{kind}"))
    for shard in shards:
        shard.unlink()
    with pytest.raises(ModelError, match="lacks 2 of the 2 files") as caught:
        files_at("m", folder)
    assert all(shard.name in str(caught.value) for shard in shards)


def test_missing_shard_without_an_index(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00001-of-00002\.safetensors"):
        files_at("m", folder)


@pytest.mark.parametrize("cut", [1, 100, 6000])
def test_short_shards_are_refused_by_name(tmp_path, cut):
    folder = sharded(tmp_path / "m")
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(shard.read_bytes()[:-cut])
    with pytest.raises(ModelError) as caught:
        read_spec(files_at("m", folder))
    text = str(caught.value)
    for i, name in ((1, NAMES[1]), (2, NAMES[3])):
        assert f"model-0000{i}-of-00002.safetensors is cut short" in text
        assert name in text


def test_index_that_names_the_wrong_shard(tmp_path):
    folder = sharded(tmp_path / "m")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name in NAMES[:2]:
        index["weight_map"][name] = "model-00002-of-00002.safetensors"
    index["weight_map"][NAMES[3]] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match="does not fit its files") as caught:
        read_spec(files_at("m", folder))
    assert all(name in str(caught.value) for name in (NAMES[0], NAMES[1], NAMES[3]))


def test_index_that_names_a_tensor_nobody_has(tmp_path):
    for kind in ("safetensors", "bin"):
        folder = sharded(tmp_path / kind, kind)
        path = next(folder.glob("*.index.json"))
        index = json.loads(path.read_text())
        index["weight_map"]["lost.weight"] = index["weight_map"][NAMES[0]]
        path.write_text(json.dumps(index))
        with pytest.raises(ModelError, match=r"lost\.weight"):
            open_source(files_at("m", folder))


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 50])
def test_headers_that_are_cut(tmp_path, keep):
    folder = single(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors is no complete safetensors file"):
        read_spec(files_at("m", folder))


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"t": 1}',
        b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"t": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b"\xff\xfe",
    ],
)
def test_headers_that_make_no_sense(tmp_path, header):
    write_config(tmp_path)
    data = struct.pack("<Q", len(header)) + header + bytes(64)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="no complete safetensors file"):
        read_spec(files_at("m", tmp_path))


def test_git_lfs_pointer(tmp_path):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        read_spec(files_at("m", tmp_path))


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'])
def test_broken_index(tmp_path, text):
    folder = sharded(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json (is no valid index|names no files)"):
        files_at("m", folder)


def test_short_torch_shards_are_refused_by_name(tmp_path):
    folder = sharded(tmp_path / "m", "bin")
    shards = sorted(folder.glob("*.bin"))
    for shard in shards:
        shard.write_bytes(shard.read_bytes()[:-500])
    with pytest.raises(ModelError, match="cannot be read as plain weights") as caught:
        open_source(files_at("m", folder))
    assert all(shard.name in str(caught.value) for shard in shards)
    assert "\n" not in str(caught.value)


def test_torch_files_run_no_code(tmp_path):
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (Path.touch, (marker,))

    write_config(tmp_path / "m")
    torch.save({"t": Evil()}, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be read as plain weights"):
        open_source(files_at("m", tmp_path / "m"))
    assert not marker.exists()


def test_float8_weights_are_named(tmp_path):
    write_config(tmp_path)
    odd = {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}
    save_file(odd, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="F8_E4M3 weights, which are not supported"):
        read_spec(files_at("m", tmp_path))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_quantized_folder(tmp_path, method):
    """One clear line, before any tensor is looked at."""
    write_config(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    save_file({"a.qweight": torch.zeros(4, 4, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"quantized with {method}"):
        read_spec(files_at("m", tmp_path))


def test_config_that_is_no_json(tmp_path):
    folder = single(tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is no valid JSON"):
        read_spec(files_at("m", folder))


# Dummy weights.


def test_dummy_has_the_whole_model_from_a_config_alone(tmp_path):
    write_config(tmp_path)
    files = files_at("m", tmp_path, "dummy")
    source = open_source(files)
    shapes = tensor_shapes(source.spec)
    assert {n: source.get(n).shape for n in source.names()} == shapes
    assert shapes["lm_head.weight"] == (64, 32)
    name = "model.layers.1.mlp.up_proj.weight"
    whole = source.get(name).read(torch.float32)
    assert torch.equal(whole, open_source(files).get(name).read(torch.float32))
    part = source.get(name).read(torch.float32, slice(24, 48), slice(16, 32))
    assert torch.equal(part, whole[24:48, 16:32])
    assert 0 < whole.std() < 0.1
    other = source.get("model.layers.0.mlp.up_proj.weight").read(torch.float32)
    assert not torch.equal(whole, other)
    norm = source.get("model.norm.weight").read(torch.float32)
    assert abs(norm.mean() - 1) < 0.1


def test_dummy_values_are_distinct_beyond_the_period(tmp_path):
    write_config(tmp_path, vocab_size=5000)
    table = open_source(files_at("m", tmp_path, "dummy")).get("model.embed_tokens.weight")
    rows = table.read(torch.float32)
    assert rows.shape == (5000, 32)
    assert len(torch.unique(rows, dim=0)) == 5000
