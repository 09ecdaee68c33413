"""Sleep over HTTP: parameters and errors with a scripted engine, the whole way with a real one on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.engine.config.settings import CacheSettings, EngineConfig
from tests.e2e.http_helpers import refused, still_fine
from tests.e2e.live_server import LiveServer, live_server
from tests.e2e.scripted import Live, ScriptedEngine, live
from tests.e2e.test_live_settings import CONFIG

ON = EngineConfig(cache=CacheSettings(sleep_mode=True))


class Sleepy(ScriptedEngine):
    """Answers calls to sleep and to wake; `error` fails the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error = ""

    async def call(self, method: str, **args: Any) -> Any:
        self.calls.append((method, args))
        if self.error:
            raise RuntimeError(self.error)
        self.stats.sleeping = method == "sleep" or args["tags"] == ["weights"]
        if method == "sleep":
            return {
                "level": args["level"],
                "freed_bytes": {"weights": 3, "kv_cache": 5},
                "notes": ["a note"],
            }
        return {"asleep": ["kv_cache"] if self.stats.sleeping else [], "notes": []}


@pytest.fixture
def engine() -> Sleepy:
    return Sleepy()


@pytest.fixture
def server(engine):
    with live(engine, ON) as made:
        yield made


def test_without_the_flag_the_way_out_is_named(engine):
    with live(engine) as server:
        for path in ("/sleep", "/wake_up"):
            error = refused(server.http.post(path), 404)
            assert "--enable-sleep-mode" in error["message"] and error["code"] == "not_enabled"
        assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert engine.calls == []


@pytest.mark.parametrize(
    ("query", "param", "words"),
    [
        ("/sleep?level=3", "level", "1 (weights to host memory) or 2"),
        ("/sleep?level=", "level", "not ''"),
        ("/sleep?mode=keep", "mode", "abort"),
        ("/sleep?levle=1", "levle", "level and mode"),
        ("/wake_up?tags=kv", "tags", "weights and kv_cache"),
        ("/wake_up?tags=weights&tags=graphs", "tags", "'graphs'"),
        ("/wake_up?level=1", "level", "takes tags"),
    ],
)
def test_bad_parameters(server: Live, engine: Sleepy, query: str, param: str, words: str):
    error = refused(server.http.post(query), 400, param)
    assert words in error["message"] and engine.calls == []
    still_fine(server)


def test_parameters_reach_the_engine(server: Live, engine: Sleepy):
    answer = server.http.post("/sleep?level=2&mode=wait")
    assert answer.status_code == 200
    assert answer.json() == {
        "is_sleeping": True,
        "level": 2,
        "freed_bytes": {"weights": 3, "kv_cache": 5},
        "notes": ["a note"],
    }
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.http.get("/health").json() == {"status": "ok", "phase": "sleeping"}
    ready = server.http.get("/ready")
    assert ready.status_code == 503 and ready.json() == {"status": "sleeping"}
    part = server.http.post("/wake_up?tags=weights").json()
    assert part == {"is_sleeping": True, "asleep": ["kv_cache"], "notes": []}
    server.http.post("/wake_up?tags=weights,kv_cache")
    server.http.post("/sleep")
    assert server.http.post("/wake_up").json()["is_sleeping"] is False
    assert server.http.get("/ready").status_code == 200
    assert engine.calls == [
        ("sleep", {"level": 2, "mode": "wait"}),
        ("wake", {"tags": ["weights"]}),
        ("wake", {"tags": ["weights", "kv_cache"]}),
        ("sleep", {"level": 1, "mode": "abort"}),
        ("wake", {"tags": []}),
    ]


def test_what_fails_is_said(server: Live, engine: Sleepy):
    engine.error = "the host has 5 MiB free"
    error = refused(server.http.post("/sleep"), 503)
    assert error["code"] == "sleep_failed" and error["message"] == "The host has 5 MiB free."
    error = refused(server.http.post("/wake_up"), 503)
    assert error["code"] == "wake_up_failed"
    engine.error = ""
    still_fine(server)
    engine.fail("it is gone")
    assert refused(server.http.post("/sleep"), 503)["code"] == "engine_failed"


# ---- a real engine


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from tests.e2e.test_live_settings import base_model

    return base_model.__wrapped__(tmp_path_factory)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 503, answer.text
    return answer.json()["error"]


def answer(server: LiveServer) -> str:
    return server.complete(prompt="a long prompt " * 20, max_tokens=24)["choices"][0]["text"]


@pytest.mark.slow
def test_a_server_sleeps_and_wakes(model: Path, tmp_path: Path):
    assert CONFIG["max_position_embeddings"] == 2048
    options = ("--load-format", "dummy", "--dtype", "float32", "--num-gpu-blocks-override", "256")
    with live_server(model, tmp_path, *options, "--enable-sleep-mode") as server:
        before = answer(server)
        for level in (1, 2):
            asked = server.post(f"/sleep?level={level}&mode=wait")
            assert asked.status_code == 200, asked.text
            assert asked.json()["level"] == level and asked.json()["freed_bytes"]["kv_cache"] > 0
            assert "the weights stay where they are" in asked.json()["notes"][0]
            assert server.get("/is_sleeping").json() == {"is_sleeping": True}
            assert server.get("/health").status_code == 200
            assert server.get("/ready").json() == {"status": "sleeping"}
            assert server.metric("headrace_sleeping") == 1
            for stream in (False, True):
                fields = {"prompt": "a", "max_tokens": 4, "stream": stream}
                error = error_of(server.post("/v1/completions", **fields))
                assert error["code"] == "sleeping" and "/wake_up" in error["message"]
            assert server.post("/tokenize", prompt="a").status_code == 200
            assert server.get("/debug/step").status_code == 400
            assert server.post("/wake_up?tags=weights").json()["asleep"] == ["kv_cache"]
            assert error_of(server.post("/v1/completions", prompt="a"))["code"] == "sleeping"
            assert server.post("/wake_up").json()["is_sleeping"] is False
            assert server.get("/ready").status_code == 200
            assert server.metric("headrace_sleeping") == 0
            assert answer(server) == before
        _ends_what_runs(server)
        server.process.terminate()  # it sleeps: that is no hurdle
        assert server.wait_ended() == 0
        server.check_log()


def _ends_what_runs(server: LiveServer) -> None:
    fields = {"prompt": "a", "max_tokens": 2000, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=fields, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.post("/sleep").status_code == 200
        last = [line for line in lines if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "sleeping"
