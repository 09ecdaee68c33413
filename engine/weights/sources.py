"""From what the user typed to files, from files to a spec and to tensors. Torch-free until `open_source`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.engine.config import env
from headrace.engine.config.settings import ModelSettings
from headrace.engine.models.spec import ModelSpec
from headrace.engine.weights import hub
from headrace.engine.weights.demo import DEMO_NAME, demo_file
from headrace.engine.weights.experts import by_expert
from headrace.engine.weights.gguf import GGUFFile
from headrace.engine.weights.local import files_at, gguf_files, tokenizer_at
from headrace.engine.weights.safetensors_files import read_shards, refuse_types, widest_dtype
from headrace.engine.weights.source import ModelError, ModelFiles, WeightSource
from headrace.engine.weights.spec_gguf import spec_from_gguf
from headrace.engine.weights.spec_hf import spec_from_hf, token_ids
from headrace.engine.weights.wheels import Progress

if TYPE_CHECKING:
    from headrace.platforms.device import DeviceRuntime


def resolve_model(settings: ModelSettings, progress: Progress | None = None) -> ModelFiles:
    """The files of `settings.model`: "demo", a folder, a GGUF file, or a repository id on the hub.

    Something that is on this disk never asks the network. `progress(done bytes, total bytes, text)` is called while
    something is downloaded, from any thread. Raises ModelError: one sentence with the way out.
    """
    offline = settings.offline or env.read(env.OFFLINE)
    files = _model(settings, offline, progress)
    if not settings.tokenizer:
        return files
    path = Path(settings.tokenizer).expanduser()
    if path.exists():
        root = tokenizer_at(path.absolute())
    else:
        request = hub.parse(settings.tokenizer)
        if request is None or request.file or request.quant:
            raise _not_found(settings.tokenizer, path)
        request = request._replace(offline=offline, cache=settings.download_dir)
        root = hub.download_tokenizer(request, progress)
    return _with_tokenizer(files, root)


def read_spec(files: ModelFiles, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """What the checkpoint says of its architecture. Torch-free; reads headers only.

    `overrides` (settings.hf_overrides) are put over config.json, nested objects key by key. The files are checked on
    the way: a shard that is missing or short, tensors that are not where the index says, and types that cannot be
    read are refused here, before anything is loaded. Raises ModelError.
    """
    if files.kind == "gguf":
        with _open_gguf(files, overrides) as file:
            return spec_from_gguf(file)
    config = _merged(_read_json(files.config), overrides or {})
    spec = spec_from_hf(config)
    if files.generation_config:
        more = token_ids(_read_json(files.generation_config).get("eos_token_id"))
        spec = replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *more))))
    if files.kind == "safetensors":
        tensors = read_shards(files.weights, files.index)
        refuse_types(tensors)
        spec = replace(spec, dtype=widest_dtype(tensors) or spec.dtype)
    return spec


def open_source(
    files: ModelFiles,
    overrides: Mapping[str, Any] | None = None,
    runtime: DeviceRuntime | None = None,
) -> WeightSource:
    """The tensors of the model, by Hugging Face names. Imports torch. Raises ModelError as `read_spec` does.

    `runtime`: the device that they are for. Made-up weights are made there; stored ones go there block by block, to be
    converted there, where it has memory of its own.
    """
    return by_expert(_open_stored(files, overrides, runtime))


def _open_stored(
    files: ModelFiles, overrides: Mapping[str, Any] | None, runtime: DeviceRuntime | None
) -> WeightSource:
    from headrace.engine.weights.upload import Uploader

    remote = runtime is not None and runtime.device.type != "cpu"
    upload = Uploader(runtime) if runtime is not None and remote else None
    if files.kind == "gguf":
        from headrace.engine.weights.gguf_source import GGUFSource

        opened = _open_gguf(files, overrides)
        return GGUFSource(files, opened, spec_from_gguf(opened), upload)
    spec = read_spec(files, overrides)
    if files.kind == "safetensors":
        from headrace.engine.weights.safetensors_source import SafetensorsSource

        return SafetensorsSource(files, spec, upload)
    if files.kind == "pt":
        from headrace.engine.weights.pt_source import TorchSource

        return TorchSource(files, spec)
    from headrace.engine.weights.dummy_source import DummySource

    return DummySource(files, spec, runtime.device if runtime is not None else None)


def _open_gguf(files: ModelFiles, overrides: Mapping[str, Any] | None) -> GGUFFile:
    if overrides:
        raise ModelError(
            f"{files.name} is a GGUF file and has no config.json to override; leave hf_overrides out"
        )
    file = GGUFFile(files.weights[0])
    file.refuse_unreadable()
    return file


def _model(settings: ModelSettings, offline: bool, progress: Progress | None) -> ModelFiles:
    name = settings.model
    if name == DEMO_NAME:
        return gguf_files(name, Path(demo_file(progress, offline=offline)))
    if not name:
        raise ModelError(
            "no model was given; give a folder, a .gguf file, org/name on the hub, or demo"
        )
    path = Path(name).expanduser()
    if path.exists():
        return files_at(name, path, settings.load_format)
    request = hub.parse(name)
    # org/name/file.gguf is a path when there is a folder `org` here: a path never asks the network.
    if request is None or (request.file and Path(path.parts[0]).is_dir()):
        raise _not_found(name, path)
    near = _near(path)
    request = request._replace(
        hint=f" (or did you mean {' or '.join(near)}?)" if near else "",
        revision=settings.revision,
        load_format=settings.load_format,
        offline=offline,
        cache=str(Path(settings.download_dir).expanduser()) if settings.download_dir else "",
    )
    return hub.download(request, progress)


def _near(path: Path) -> list[str]:
    """Paths on this disk that `path` may be a slip of the pen for."""
    folder = path.parent
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.75)
    return [str(folder / name) for name in close]


def _not_found(name: str, path: Path) -> ModelError:
    near = _near(path)
    hint = (
        f"did you mean {' or '.join(near)}?"
        if near
        else ("give a folder, a .gguf file, org/name on the hub, or demo")
    )
    return ModelError(f"{name} does not exist; {hint}")


def _with_tokenizer(files: ModelFiles, root: str) -> ModelFiles:
    return msgspec.structs.replace(files, tokenizer_root=root)


def _merged(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = (
            _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
        )
    return merged


def _read_json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is no valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; download it again")
    return value
