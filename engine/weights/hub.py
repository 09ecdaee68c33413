"""Models from the Hugging Face hub, by repository id. Torch-free.

What to download is decided from the repository's list of files: one form of the weights (safetensors before PyTorch
before GGUF), its config and its tokenizer; never two forms of the same weights.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.engine.weights.local import LOAD_FORMATS, TOKENIZER_FILES, files_at, gguf_choices
from headrace.engine.weights.source import ModelError, ModelFiles
from headrace.engine.weights.wheels import Progress

_SMALL = re.compile(r"^[^/]+\.(json|jinja|txt|model)$")
_QUANT = re.compile(r"(?i)(?:^|[-._/])((?:iq|q|tq|mxfp|bf|fp|f)\d+(?:_[a-z0-9]+)*)(?=$|[-._/])")
_POLL = 0.2  # seconds

# of a repository's files, those to download
Choice = Callable[["HubRequest", Sequence[str]], list[str]]


class HubRequest(NamedTuple):
    """A model on the hub. `file` is a GGUF file of the repository, `quant` the type of one ("Q4_K_M")."""

    name: str  # what the user typed
    repo: str
    file: str = ""
    quant: str = ""
    revision: str = ""
    load_format: str = "auto"
    offline: bool = False
    cache: str = ""  # "" = the hub library's own
    endpoint: str = ""  # "" = the hub library's own
    hint: str = ""  # said when the model is not found: a path on this disk that may be meant


def parse(name: str) -> HubRequest | None:
    """`org/name`, `org/name:Q4_K_M` or `org/name/file.gguf`; None when `name` is none of them."""
    part = r"[A-Za-z0-9][\w.-]*"
    match = re.fullmatch(rf"({part}/{part})(?::([\w.-]+)|/((?:[\w.-]+/)*[\w.-]+\.gguf))?", name)
    if match is None or (match[3] is None and match[1].lower().endswith(".gguf")):
        return None
    return HubRequest(name, match[1], file=match[3] or "", quant=match[2] or "")


def download(request: HubRequest, progress: Progress | None = None) -> ModelFiles:
    """The model's files in the hub library's cache, downloaded where they are not there. Raises ModelError."""
    if request.load_format not in LOAD_FORMATS:
        raise ModelError(
            f"load format {request.load_format} is unknown; use one of {', '.join(LOAD_FORMATS)}"
        )
    root = Path(_snapshot(request, _wanted, progress))
    return _resolve(request, root)


def download_tokenizer(request: HubRequest, progress: Progress | None = None) -> str:
    """A folder with the tokenizer files of the repository. Raises ModelError."""
    root = Path(
        _snapshot(request, lambda _, files: [f for f in files if _SMALL.match(f)], progress)
    )
    if not any((root / n).exists() for n in TOKENIZER_FILES):
        raise ModelError(
            f"{request.repo} has no tokenizer; it needs {' or '.join(TOKENIZER_FILES[:2])}"
        )
    return str(root)


def _resolve(request: HubRequest, root: Path) -> ModelFiles:
    """The model in a snapshot, which may hold more than this request asked for."""
    if request.file:
        return files_at(request.name, root / request.file, request.load_format)
    files = _relative_files(root)
    plain = any(f.endswith((".safetensors", ".bin")) for f in files) and not request.quant
    wants_gguf = request.load_format == "gguf" or (request.load_format == "auto" and not plain)
    if wants_gguf and any(f.endswith(".gguf") for f in files):
        return files_at(request.name, root / _choose(request, files), "gguf")
    return files_at(request.name, root, request.load_format)


def _relative_files(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def _wanted(request: HubRequest, files: Sequence[str]) -> list[str]:
    """The files of a repository to download."""
    small = [f for f in files if _SMALL.match(f)]
    if request.file:
        if request.file not in files:
            there = ", ".join(gguf_choices([f for f in files if f.endswith(".gguf")])) or "none"
            raise ModelError(f"{request.repo} has no file {request.file}; its GGUF files: {there}")
        return small + _with_parts(request.file, files)
    form = request.load_format
    if form == "dummy":
        return small
    plain = [f for f in files if "/" not in f and not f.startswith("consolidated")]
    for kind, suffix in (("safetensors", ".safetensors"), ("pt", ".bin")):
        found = [f for f in plain if f.endswith(suffix)]
        if found and form in ("auto", kind) and not request.quant:
            return small + found
    if form in ("auto", "gguf") and any(f.endswith(".gguf") for f in files):
        return small + _with_parts(_choose(request, files), files)
    wanted = "safetensors, PyTorch or GGUF weights" if form == "auto" else f"{form} weights"
    raise ModelError(f"{request.repo} has no {wanted}; choose another repository")


def _choose(request: HubRequest, files: Sequence[str]) -> str:
    """The GGUF model of a repository: the only one, or the one of the type asked for."""
    models = gguf_choices([f for f in files if f.endswith(".gguf")])
    tags = {_tag(f): f for f in models}
    if request.quant:
        if request.quant.upper() in tags:
            return tags[request.quant.upper()]
        raise ModelError(
            f"{request.repo} has no {request.quant} file; it has {', '.join(sorted(tags))}"
        )
    if len(models) == 1:
        return models[0]
    if not models:
        raise ModelError(f"{request.repo} has no GGUF model; choose another repository")
    example = "Q4_K_M" if "Q4_K_M" in tags else sorted(tags)[0]
    raise ModelError(
        f"{request.repo} holds several GGUF models; add the one to use, for example {request.repo}:{example} "
        f"(it has {', '.join(sorted(tags))})"
    )


def _tag(file: str) -> str:
    """The type in a GGUF file's name ("...-Q4_K_M.gguf", "Q8_0/...-00001-of-00002.gguf"), else its stem."""
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", file.removesuffix(".gguf"))
    found = _QUANT.findall(stem)
    return found[-1].upper() if found else os.path.basename(stem).upper()


def _with_parts(file: str, files: Sequence[str]) -> list[str]:
    match = re.match(r"(.*)-\d{5}(-of-\d{5}\.gguf)$", file)
    if match is None:
        return [file]
    return [
        f for f in files if re.fullmatch(re.escape(match[1]) + r"-\d{5}" + re.escape(match[2]), f)
    ]


def _snapshot(request: HubRequest, choose: Choice, progress: Progress | None) -> str:
    """The snapshot folder. Without a network, a snapshot that was downloaded before will do."""
    from huggingface_hub import HfApi, snapshot_download

    cached = _cached(request)
    if request.offline:
        if cached:
            return cached
        raise ModelError(
            f"{request.repo} is not in the hub's cache and offline is set; start once without it, "
            f"or give a folder or a GGUF file{request.hint}"
        )
    endpoint, revision = request.endpoint or None, request.revision or None
    with _explained(request):
        try:
            api = HfApi(endpoint=endpoint)
            info = api.model_info(request.repo, revision=revision, files_metadata=True)
            sizes = {s.rfilename: s.size or 0 for s in info.siblings or ()}
            names = choose(request, list(sizes))
            # Names are patterns here: a bracket in one must stand for itself.
            patterns = [re.sub(r"([\[*?])", r"[\1]", n) for n in names]
            with _watched(request, sum(sizes[n] for n in names), progress):
                return snapshot_download(
                    request.repo,
                    revision=revision,
                    allow_patterns=patterns,
                    cache_dir=request.cache or None,
                    endpoint=endpoint,
                )
        except Exception as error:
            if not _is_network(error):
                raise
            if cached:
                return cached
            raise ModelError(
                f"the hub cannot be reached ({type(error).__name__}) and {request.repo} is not in its cache; check "
                f"the network, or give a folder or a GGUF file{request.hint}"
            ) from None


def _repo_folder(request: HubRequest) -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(request.cache or HF_HUB_CACHE, "models--" + request.repo.replace("/", "--"))


def _cached(request: HubRequest) -> str:
    """The snapshot in the hub library's cache, "" when there is none. By the cache's layout and not through the
    library, which takes a snapshot for incomplete when files were left out on purpose."""
    folder, revision = _repo_folder(request), request.revision or "main"
    with contextlib.suppress(OSError):
        revision = (folder / "refs" / revision).read_text().strip()
    snapshot = folder / "snapshots" / revision
    return str(snapshot) if snapshot.is_dir() else ""


def _is_network(error: Exception) -> bool:
    """The hub library speaks through httpx (of either name), or through requests before its version 1."""
    return isinstance(error, ConnectionError) or any(
        kind.__module__.partition(".")[0] in ("httpx", "httpx2", "requests")
        and kind.__name__ in ("TransportError", "ConnectionError", "Timeout")
        for kind in type(error).__mro__
    )


@contextlib.contextmanager
def _explained(request: HubRequest) -> Iterator[None]:
    """The hub library's errors as one sentence each."""
    from huggingface_hub import errors

    repo = request.repo
    try:
        yield
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo} is gated: accept its terms on its page on the hub, then run `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{repo} has no revision {request.revision}; check its name") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{repo} is neither on this disk nor on the hub; check the name, and for a private repository run "
            f"`hf auth login` or set HF_TOKEN{request.hint}"
        ) from None
    except errors.HFValidationError:
        raise ModelError(
            f"{repo} is no valid repository id; give org/name, a folder or a .gguf file"
        ) from None
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        raise ModelError(f"the hub answered {status} for {repo}; try again later") from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(
                f"the disk is too full for {repo}; free some space or set a download folder on another disk"
            ) from None
        raise _failed(repo, error) from None
    except ModelError:
        raise
    except Exception as error:  # the library's download engine has error types of its own
        raise _failed(repo, error) from None


def _failed(repo: str, error: Exception) -> ModelError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return ModelError(
        f"{repo} could not be downloaded ({reason}); start again, or give a folder or a GGUF file"
    )


@contextlib.contextmanager
def _watched(request: HubRequest, total: int, progress: Progress | None) -> Iterator[None]:
    """Reports the growth of the cache while the body downloads; the hub library's own bars are silent meanwhile."""
    if progress is None:
        yield
        return
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    folder = _repo_folder(request) / "blobs"
    before = _bytes_in(folder)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL):
            grown = min(total, _bytes_in(folder) - before)
            if grown > 0:
                progress(grown, total, f"downloading {request.repo}")

    silent = are_progress_bars_disabled()
    if not silent:
        disable_progress_bars()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        if not silent:
            enable_progress_bars()


def _bytes_in(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):  # a finished file is renamed while it is looked at
                total += entry.stat().st_size
    return total
