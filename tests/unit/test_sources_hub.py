"""Models by repository id, against a hub of our own on this machine."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headrace.engine.config.settings import ModelSettings
from headrace.engine.weights import hub, sources
from headrace.engine.weights.hub import HubRequest, download, download_tokenizer, parse
from headrace.engine.weights.source import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """Answers what the hub library asks: the list of a repository's files, and the files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.errors: dict[str, tuple[int, str]] = {}  # repository -> status, X-Error-Code
        self.fetched: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def request(self, name: str, cache: Path, **more) -> HubRequest:
        parsed = parse(name)
        assert parsed is not None
        return parsed._replace(endpoint=self.url, cache=str(cache), **more)


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            return self._info(path.removeprefix("/api/models/"))
        repo, _, rest = path[1:].partition("/resolve/")
        revision, _, name = rest.partition("/")
        data = self.server.repos.get(repo, {}).get(name)
        if data is None or revision not in ("main", COMMIT):
            return self._refuse(404, "EntryNotFound")
        if self.command == "GET":
            self.server.fetched.append(name)
        self._answer(data, {"ETag": f'"{hash((repo, name)) & 0xFFFFFFFF:x}"'})

    do_HEAD = do_GET

    def _info(self, rest: str) -> None:
        repo, tree, revision = rest.partition("/tree/")
        if not tree:
            repo, _, revision = rest.partition("/revision/")
        if repo in self.server.errors:
            return self._refuse(*self.server.errors[repo])
        if repo not in self.server.repos:
            return self._refuse(401, "RepoNotFound")
        if revision not in ("", "main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        files = self.server.repos[repo]
        if tree:
            entries = [
                {"type": "file", "path": n, "size": len(d), "oid": "0" * 40}
                for n, d in files.items()
            ]
            return self._answer(json.dumps(entries).encode(), {"Content-Type": "application/json"})
        siblings = [{"rfilename": n, "size": len(d)} for n, d in files.items()]
        body = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}
        self._answer(json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _answer(self, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for key, value in {
            **headers,
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(len(data)),
        }.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


GGUF = b"GGUF" + (3).to_bytes(4, "little") + bytes(80)
PLAIN = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "generation_config.json": b"{}",
    "README.md": b"# words",
    "model.safetensors": b"s" * 4000,
    "pytorch_model.bin": b"p" * 4000,
    "consolidated.safetensors": b"c" * 4000,
    "onnx/model.onnx": b"o" * 4000,
    "original/params.json": b"{}",
}
QUANTS = {
    "README.md": b"# words",
    "m-Q4_K_M.gguf": GGUF,
    "m-Q8_0.gguf": GGUF + b"8",
    "m-f16.gguf": GGUF + b"16",
    "mmproj-m-f16.gguf": GGUF,
}


@pytest.mark.parametrize(
    ("name", "repo", "file", "quant"),
    [
        ("org/name", "org/name", "", ""),
        ("org/na.me-1_b", "org/na.me-1_b", "", ""),
        ("org/name-GGUF:Q4_K_M", "org/name-GGUF", "", "Q4_K_M"),
        ("org/name/m-Q8_0.gguf", "org/name", "m-Q8_0.gguf", ""),
        ("org/name/Q8_0/m-00001-of-00002.gguf", "org/name", "Q8_0/m-00001-of-00002.gguf", ""),
    ],
)
def test_ids(name, repo, file, quant):
    assert parse(name) == HubRequest(name, repo, file=file, quant=quant)


@pytest.mark.parametrize(
    "name", ["gpt2", "a/b.gguf", "/a/b", "./a/b", "a/b/c", "~/a", "a b/c", "", "a/"]
)
def test_no_ids(name):
    assert parse(name) is None


def test_one_form_of_the_weights_is_downloaded(fake, tmp_path):
    fake.repos["org/m"] = PLAIN
    seen = []
    files = download(fake.request("org/m", tmp_path), lambda *args: seen.append(args))
    assert files.kind == "safetensors"
    assert files.name == "org/m"
    assert [Path(p).name for p in files.weights] == ["model.safetensors"]
    assert Path(files.weights[0]).read_bytes() == PLAIN["model.safetensors"]
    assert Path(files.generation_config).exists()
    assert set(fake.fetched) == {
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert all(0 < done <= total for done, total, _ in seen)


def test_the_form_that_was_asked_for(fake, tmp_path):
    fake.repos["org/m"] = PLAIN
    files = download(fake.request("org/m", tmp_path, load_format="pt"))
    assert files.kind == "pt"
    assert "model.safetensors" not in fake.fetched
    files = download(fake.request("org/m", tmp_path / "2", load_format="dummy"))
    assert files.kind == "dummy"
    with pytest.raises(ModelError, match="org/m has no gguf weights"):
        download(fake.request("org/m", tmp_path / "3", load_format="gguf"))


@pytest.mark.parametrize("name", ["org/q:Q8_0", "org/q:q8_0", "org/q/m-Q8_0.gguf"])
def test_one_gguf_of_several(fake, tmp_path, name):
    fake.repos["org/q"] = QUANTS
    files = download(fake.request(name, tmp_path))
    assert files.kind == "gguf"
    assert [Path(p).name for p in files.weights] == ["m-Q8_0.gguf"]
    assert fake.fetched == ["m-Q8_0.gguf"]


def test_several_ggufs_are_listed(fake, tmp_path):
    fake.repos["org/q"] = QUANTS
    with pytest.raises(ModelError, match=r"for example org/q:Q4_K_M \(it has F16, Q4_K_M, Q8_0\)"):
        download(fake.request("org/q", tmp_path))
    with pytest.raises(ModelError, match="has no Q2_K file; it has F16, Q4_K_M, Q8_0"):
        download(fake.request("org/q:Q2_K", tmp_path))
    with pytest.raises(ModelError, match=r"has no file x\.gguf; its GGUF files: m-Q4_K_M\.gguf"):
        download(fake.request("org/q/x.gguf", tmp_path))
    assert fake.fetched == []


def test_a_second_quant_beside_the_first(fake, tmp_path):
    """The cache then holds both; each name still means its own."""
    fake.repos["org/q"] = QUANTS
    for tag in ("Q8_0", "Q4_K_M"):
        files = download(fake.request(f"org/q:{tag}", tmp_path))
        assert Path(files.weights[0]).name == f"m-{tag}.gguf"
    files = download(fake.request("org/q:Q8_0", tmp_path, offline=True))
    assert Path(files.weights[0]).name == "m-Q8_0.gguf"


def test_all_parts_of_a_split_gguf(fake, tmp_path):
    parts = {}
    for i in (1, 2):
        keys = b""
        for key, value in (("split.no", i - 1), ("split.count", 2)):
            keys += len(key).to_bytes(8, "little") + key.encode()
            keys += (2).to_bytes(4, "little") + value.to_bytes(2, "little")
        head = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little")
        parts[f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf"] = (
            head + (2).to_bytes(8, "little") + keys + bytes(64)
        )
    fake.repos["org/q"] = {**QUANTS, **parts}
    del fake.repos["org/q"]["m-Q8_0.gguf"]
    files = download(fake.request("org/q:Q8_0", tmp_path))
    assert [Path(p).name for p in files.weights] == [Path(n).name for n in parts]


def test_cached_models_need_no_network(fake, tmp_path):
    fake.repos["org/m"] = PLAIN
    first = download(fake.request("org/m", tmp_path))
    fake.fetched.clear()
    assert download(fake.request("org/m", tmp_path, offline=True)) == first
    assert download(fake.request("org/m", tmp_path)) == first
    assert fake.fetched == []
    # The network is away: what is in the cache will do.
    gone = fake.request("org/m", tmp_path)._replace(endpoint="http://127.0.0.1:9")
    assert download(gone) == first


def test_offline_and_not_cached(fake, tmp_path):
    with pytest.raises(ModelError, match="not in the hub's cache and offline is set"):
        download(fake.request("org/m", tmp_path, offline=True))


def test_no_network_and_not_cached(fake, tmp_path):
    request = fake.request("org/m", tmp_path)._replace(endpoint="http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"hub cannot be reached .*ConnectError.*not in its cache"):
        download(request)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", r"neither on this disk nor on the hub; check the name"),
        (401, "RepoNotFound", r"neither on this disk nor on the hub"),
        (403, "GatedRepo", r"is gated: accept its terms"),
        (429, "", r"the hub answered 429 for org/m; try again later"),
        (403, "", r"the hub answered 403"),
    ],
)
def test_refusals_of_the_hub(fake, tmp_path, status, code, message):
    fake.errors["org/m"] = (status, code)
    with pytest.raises(ModelError, match=message) as caught:
        download(fake.request("org/m", tmp_path))
    assert "\n" not in str(caught.value)


def test_unknown_revision(fake, tmp_path):
    fake.repos["org/m"] = PLAIN
    with pytest.raises(ModelError, match="org/m has no revision v9"):
        download(fake.request("org/m", tmp_path, revision="v9"))
    files = download(fake.request("org/m", tmp_path, revision=COMMIT))
    assert files.kind == "safetensors"


def test_repositories_without_weights(fake, tmp_path):
    fake.repos["org/data"] = {"README.md": b"", "config.json": b"{}"}
    with pytest.raises(ModelError, match="has no safetensors, PyTorch or GGUF weights"):
        download(fake.request("org/data", tmp_path))


def test_tokenizer_of_another_repository(fake, tmp_path):
    fake.repos["org/m"] = PLAIN
    root = download_tokenizer(fake.request("org/m", tmp_path))
    assert (Path(root) / "tokenizer.json").exists()
    assert "model.safetensors" not in fake.fetched
    fake.repos["org/none"] = {"config.json": b"{}"}
    with pytest.raises(ModelError, match="org/none has no tokenizer"):
        download_tokenizer(fake.request("org/none", tmp_path))


def test_settings_reach_the_request(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "download", lambda request, progress: asked.append(request))
    settings = ModelSettings(
        model="org/m:Q8_0",
        revision="v1",
        load_format="gguf",
        offline=True,
        download_dir=str(tmp_path),
    )
    sources.resolve_model(settings)
    (request,) = asked
    assert (request.repo, request.quant, request.revision) == ("org/m", "Q8_0", "v1")
    assert (request.load_format, request.offline, request.cache) == ("gguf", True, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sources.resolve_model(ModelSettings(model="org/m"))
    assert asked[1].offline


def test_a_path_nearby_is_hinted_at(fake, tmp_path, monkeypatch):
    (tmp_path / "models" / "SmolLM2-135M").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    real = hub.download

    def ask(request, progress):
        return real(request._replace(endpoint=fake.url, cache=str(tmp_path / "cache")), progress)

    monkeypatch.setattr(hub, "download", ask)
    with pytest.raises(ModelError, match=r"nor on the hub.*did you mean models/SmolLM2-135M\?"):
        sources.resolve_model(ModelSettings(model="models/SmolLM2-135B"))
