"""The server itself: the cases 95, 96, 98, 100, 101, 103, 104 and 105, start-up and the engine's death."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_metrics

from headrace.engine.config.settings import (
    EngineConfig,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
)
from tests.e2e.http_helpers import USER, chat, complete, events, refused, still_fine, stream_of
from tests.e2e.scripted import Live, Script, ScriptedEngine, live, text_tokens

SLOW = Script(text_tokens("x") * 400, delay=0.02)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def send(server: Live, path: str, **body: Any) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", server.port), 10)
    data = json.dumps(body).encode()
    raw.sendall(
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data))
    )
    raw.sendall(data)
    return raw


# ---- 95: disconnects


@pytest.mark.parametrize("stage", ["stream", "whole", "prefill", "queued", "choices"])
def test_case_95_disconnect(stage: str) -> None:
    script = Script(SLOW.tokens, 0.02, first_delay=60 if stage in ("prefill", "queued") else 0)
    engine = ScriptedEngine(script, context=1000, slots=1 if stage == "queued" else 8)
    with live(engine) as server:
        body: dict[str, Any] = {"messages": USER, "stream": stage in ("stream", "prefill")}
        if stage == "choices":
            body["n"] = 3
        first = send(server, "/v1/chat/completions", **body)
        second = send(server, "/v1/chat/completions", **body) if stage == "queued" else None
        wanted = {"queued": 2, "choices": 3}.get(stage, 1)
        until(lambda: len(engine.submits) == wanted)
        if stage == "stream":
            received = b""
            while received.count(b"data: ") < 3:
                received += first.recv(65536)
        if second is not None:
            second.close()
            until(lambda: len(engine.aborted) == 1, 1.0)
            assert engine.stats.waiting == 0 and engine.stats.running == 1
        first.close()
        until(lambda: engine.unfinished == 0, 1.0)
        assert (engine.stats.running, engine.stats.waiting, engine.stats.kv_used_blocks) == (
            0,
            0,
            0,
        )
        assert len(engine.aborted) == wanted
        until(lambda: server.state.admission.used == 0, 1.0)


# ---- 96: keys


def keyed() -> EngineConfig:
    return EngineConfig(server=ServerSettings(api_keys=("secret-1", "sécret-2")))


def test_case_96_every_route_needs_a_key() -> None:
    with live(config=keyed()) as server:
        paths = set(
            httpx.get(f"{server.url}/openapi.json", headers=bearer("secret-1")).json()["paths"]
        )
        paths |= {"/docs", "/openapi.json", "/nope", "/health/", "/ready/", "//health", "/Health"}
        paths |= {"//v1/models", "/v1/models/", "/metrics/", "/health/../metrics", "/%2e/metrics"}
        for path in sorted(paths - {"/health", "/ready"}):
            for method in ("GET", "POST", "DELETE", "OPTIONS"):
                for headers in (
                    {},
                    bearer("wrong"),
                    {"Authorization": "Bearer"},
                    {"Authorization": "secret-1"},
                ):
                    answer = server.http.request(method, path, headers=headers)
                    refused(answer, 401)
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/ready").status_code == 200


def bearer(key: str, scheme: str = "Bearer") -> dict[str, Any]:
    return {"Authorization": f"{scheme} {key}".encode()}


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("key", ["secret-1", "sécret-2"])
def test_case_96_right_keys(scheme: str, key: str) -> None:
    with live(config=keyed()) as server:
        for path in ("/v1/models", "/metrics", "/version", "/docs"):
            assert server.http.get(path, headers=bearer(key, scheme)).status_code == 200


# ---- 98: CORS


def test_case_98_cors() -> None:
    with live(config=keyed()) as server:
        asked = {
            "Origin": "http://page",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        answer = server.http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        wrong = {"Origin": "http://page", **bearer("wrong")}
        answer = server.http.post("/v1/chat/completions", json={}, headers=wrong)
        refused(answer, 401)
        assert answer.headers["access-control-allow-origin"] == "*"


def test_cors_origins_are_obeyed() -> None:
    settings = ServerSettings(cors_origins=("http://good",))
    with live(config=EngineConfig(server=settings)) as server:
        good = server.http.get("/v1/models", headers={"Origin": "http://good"})
        assert good.headers["access-control-allow-origin"] == "http://good"
        bad = server.http.get("/v1/models", headers={"Origin": "http://bad"})
        assert "access-control-allow-origin" not in bad.headers
        assert "Origin" in bad.headers["vary"]
        asked = {"Origin": "http://bad", "Access-Control-Request-Method": "POST"}
        assert server.http.options("/v1/completions", headers=asked).status_code == 403


# ---- 100: queue limit


def limited(running: int, waiting: int) -> EngineConfig:
    return EngineConfig(scheduler=SchedulerSettings(max_num_seqs=running, max_waiting=waiting))


def test_case_100_queue_limit() -> None:
    engine = ScriptedEngine(Script(text_tokens("x") * 20, delay=0.05), slots=1)
    with live(engine, limited(1, 1)) as server, ThreadPoolExecutor(10) as threads:
        running = [threads.submit(chat, server) for _ in range(2)]
        until(lambda: server.state.admission.used == 2)
        for at in range(8):
            start = time.monotonic()
            answer = chat(server, n=3 if at == 0 else 1, stream=at % 2 == 1)
            assert time.monotonic() - start < 1.0  # at once, not after a place is free
            assert refused(answer, 429)["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
        assert [future.result().status_code for future in running] == [200, 200]
        assert server.state.admission.used == 0
        still_fine(server)


def test_a_request_that_fails_gives_its_places_back() -> None:
    with live(config=limited(1, 1)) as server:
        for _ in range(5):
            refused(complete(server, prompt=[[1], [97] * 500]))
            refused(complete(server, prompt=["a", "b", "c"]), 429)
        assert server.state.admission.used == 0
        assert complete(server, prompt=["a", "b"]).status_code == 200


def test_no_queue_limit() -> None:
    with live(config=limited(1, 0)) as server:
        assert complete(server, prompt=["a"] * 40).status_code == 200


# ---- 101: draining (the signals themselves: test_http_process.py)


def test_case_101_drains_with_tokens_flowing() -> None:
    engine = ScriptedEngine(Script(text_tokens("x") * 30, delay=0.03))
    with live(engine) as server, ThreadPoolExecutor(1) as threads:
        running = threads.submit(chat, server, stream=True)
        until(lambda: engine.unfinished == 1)
        server.stop()
        until(lambda: server.state.draining)
        refused(chat(server), 503)
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/ready").json()["status"] == "draining"
        text = [c["choices"][0]["delta"].get("content", "") for c in stream_of(running.result())]
        assert "".join(text) == "x" * 30
        assert server.join() == 0


@pytest.mark.parametrize("twice", [False, True])
def test_case_101_drain_time_over_or_second_signal(twice: bool) -> None:
    settings = ServerSettings(drain_seconds=60.0 if twice else 0.0)
    with live(ScriptedEngine(SLOW, context=1000), EngineConfig(server=settings)) as server:
        with ThreadPoolExecutor(2) as threads:
            stream = threads.submit(chat, server, stream=True)
            whole = threads.submit(chat, server)
            until(lambda: server.engine.unfinished == 2)
            server.stop()
            if twice:
                server.stop()
            assert server.join(10) == 0
            last = events(stream.result().text)[-1]
            assert last["error"]["code"] == "shutting_down"
            assert refused(whole.result(), 503)["code"] == "shutting_down"
        assert len(server.engine.aborted) == 2


# ---- start-up and the engine's death


def test_starting() -> None:
    engine = ScriptedEngine(ready=False)
    with live(engine) as server:
        assert server.http.get("/health").json() == {"status": "ok", "phase": "starting"}
        ready = server.http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["progress"] == {
            "phase": "load",
            "done": 3.0,
            "total": 10.0,
            "text": "weights",
        }
        for answer in (chat(server), complete(server), server.http.get("/v1/models")):
            assert refused(answer, 503)["code"] == "starting"
            assert int(answer.headers["retry-after"]) >= 1
        assert server.http.get("/metrics").status_code == 200
        assert server.http.get("/version").status_code == 200
        server.do(engine.become_ready)
        until(lambda: server.http.get("/ready").status_code == 200)
        still_fine(server)


def test_failure_while_starting() -> None:
    engine = ScriptedEngine(ready=False)
    with live(engine) as server:
        server.do(lambda: engine.fail("no memory left"))
        assert server.join() == 1


def test_engine_death() -> None:
    engine = ScriptedEngine(SLOW, context=1000)
    with live(engine) as server, ThreadPoolExecutor(2) as threads:
        stream = threads.submit(chat, server, stream=True)
        whole = threads.submit(chat, server)
        until(lambda: engine.unfinished == 2)
        server.do(engine.fail)
        error = refused(whole.result(), 503)
        assert error["code"] == "engine_failed" and "out of memory" in error["message"].lower()
        assert events(stream.result().text)[-1]["error"]["code"] == "engine_failed"
        with httpx.Client(base_url=server.url, trust_env=False) as fresh:
            health = fresh.get("/health")
            assert health.status_code == 503 and "memory" in health.json()["reason"]
            assert fresh.get("/ready").status_code == 503
            refused(fresh.post("/v1/chat/completions", json={"messages": USER}), 503)
        assert server.join() == 1


# ---- 103, 104, 105 and the rest


def test_case_103_health_during_a_long_prefill() -> None:
    with live(ScriptedEngine(Script(first_delay=1.0))) as server, ThreadPoolExecutor(8) as threads:
        running = [threads.submit(chat, server) for _ in range(8)]
        while not all(future.done() for future in running):
            start = time.monotonic()
            assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
            assert time.monotonic() - start < 1.0
        assert all(future.result().status_code == 200 for future in running)


def values(text: str, parse: Callable[[str], Any] = plain_metrics) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for family in parse(text):
        for sample in family.samples:
            labels = sorted(v for k, v in sample.labels.items() if k != "model_name")
            assert sample.labels["model_name"] == "served", sample
            key = (sample.name, *labels)
            assert key not in found, "one series only"
            found[key] = sample.value
    return found


def test_case_104_metrics() -> None:
    settings = ServerSettings(served_model_names=("served", "other"))
    with live(config=EngineConfig(server=settings)) as server:
        usage = [chat(server, n=2).json()["usage"], complete(server, max_tokens=2).json()["usage"]]
        chat(server, stream=True)
        refused(chat(server, n=0))
        answer = server.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = values(answer.text)
        usage.append(chat(server).json()["usage"])  # what the stream used
        for name in ("prompt", "completion"):
            total = sum(u[f"{name}_tokens"] for u in usage)
            kind = {"prompt": "prompt", "completion": "generation"}[name]
            assert found[(f"headrace_{kind}_tokens_total",)] == total
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usage)
        assert found[("headrace_prompt_cached_tokens_total",)] == cached > 0
        assert found[("headrace_requests_finished_total", "stop")] == 3
        assert found[("headrace_requests_finished_total", "length")] == 1
        assert found[("headrace_time_to_first_token_seconds_count",)] == 4
        assert found[("headrace_request_latency_seconds_count",)] == 4
        assert found[("headrace_request_queue_seconds_sum",)] == 4 * 0.25
        assert found[("headrace_inter_token_latency_seconds_count",)] == 3 * 5 + 1
        assert found[("headrace_requests_running",)] == 0
        assert found[("headrace_selection_info", "attention", "reference", "yes")] == 1
        post = ("/v1/chat/completions", "POST")
        assert found[("headrace_http_requests_total", *sorted(("200", *post)))] == 2
        assert found[("headrace_http_requests_total", *sorted(("400", *post)))] == 1
        for name in re.findall(r"^# TYPE (\S+)", answer.text, re.M):
            assert f"# HELP {name} " in answer.text
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        answer = server.http.get("/metrics", headers=accept)
        assert "openmetrics" in answer.headers["content-type"]
        assert values(answer.text, open_metrics)


def test_case_105_model_names() -> None:
    with live(model="/models/org/tiny.gguf") as server:
        assert [m["id"] for m in server.http.get("/v1/models").json()["data"]] == ["tiny.gguf"]
        for name in ("tiny.gguf", "/models/org/tiny.gguf", None):
            assert chat(server, model=name).status_code == 200
        assert chat(server).json()["model"] == "tiny.gguf"
        for name in ("wrong", "", "tiny", "TINY.GGUF", "x" * 5000):
            for ask in (chat, complete):
                error = refused(ask(server, model=name), 404, "model")
                assert error["code"] == "model_not_found"
        refused(server.http.get("/v1/models/wrong"), 404)
        assert server.http.get("/v1/models/tiny.gguf").json()["id"] == "tiny.gguf"
    settings = ServerSettings(served_model_names=("a", "b/c"))
    with live(config=EngineConfig(ModelSettings(), server=settings), model="org/tiny") as server:
        assert chat(server, model="a").json()["model"] == "a"
        assert chat(server, model="b/c").json()["model"] == "b/c"
        refused(chat(server, model="org/tiny"), 404)
        assert server.http.get("/v1/models/b/c").json()["id"] == "b/c"


def test_unknown_routes_and_methods(server: Live) -> None:
    refused(server.http.get("/nope"), 404)
    refused(server.http.get("//v1/models"), 404)
    refused(server.http.get("/v1/chat/completions/"), 404)
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.http.get(path)
        refused(answer, 405)
        assert answer.headers["allow"] == "POST"
    refused(server.http.delete("/v1/models"), 405)
    assert server.http.head("/health").status_code == 200


def test_what_the_worker_says_of_a_profile_is_passed_on(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(self: ScriptedEngine, method: str, **args: Any) -> Any:
        if args["requests"] > 16:
            raise RuntimeError("requests must be from 1 to 16")
        return {"method": method, **args}

    monkeypatch.setattr(ScriptedEngine, "call", call)
    asked = server.http.get("/debug/step", params={"requests": 3, "context": 50})
    sizes = {"requests": 3, "context": 50, "prompt": 0, "decodes": 0}
    assert asked.json() == {"method": "profile_step", **sizes}
    assert refused(server.http.get("/debug/step?requests=17"), 400)["param"] == "requests"
    for query in ("requests=many", "requests=-1", "prompt=x", "context=1e3", f"context={'9' * 40}"):
        refused(server.http.get(f"/debug/step?{query}"), 400, query.partition("=")[0])


def test_request_ids(server: Live) -> None:
    given = server.http.get("/health", headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = {server.http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    long = server.http.get("/health", headers={"X-Request-Id": "x" * 1000})
    assert len(long.headers["x-request-id"]) == 32
    assert chat(server, stream=True).headers["x-request-id"]
    assert "x-request-id" in server.http.get("/nope").headers


def test_root_path() -> None:
    settings = ServerSettings(root_path="/llm", api_keys=("k",))
    with live(config=EngineConfig(server=settings)) as server:
        for prefix in ("", "/llm"):
            assert server.http.get(f"{prefix}/health").status_code == 200
            refused(server.http.get(f"{prefix}/v1/models"), 401)
            assert server.http.get(f"{prefix}/v1/models", headers=bearer("k")).status_code == 200


def test_priority_needs_the_policy(server: Live) -> None:
    refused(chat(server, priority=1), param="priority")
    assert chat(server, priority=0).status_code == 200
    config = EngineConfig(scheduler=SchedulerSettings(policy="priority"))
    with live(config=config) as other:
        assert chat(other, priority=-3, cache_salt="s").status_code == 200
        assert (other.engine.submits[0].priority, other.engine.submits[0].cache_salt) == (-3, "s")


def test_many_streams_with_disconnects() -> None:
    """A flood: everything that was not cut is whole, and nothing stays behind."""
    engine = ScriptedEngine(lambda s: Script(text_tokens("ab") * 10, delay=0.005), slots=16)
    with live(engine, EngineConfig(scheduler=SchedulerSettings(max_num_seqs=500))) as server:

        def one(at: int) -> bool:
            if at % 3 == 0:
                raw = send(server, "/v1/chat/completions", messages=USER, stream=at % 2 == 0)
                time.sleep(0.001 * (at % 40))
                raw.close()
                return True
            text = [
                c["choices"][0]["delta"].get("content", "")
                for c in stream_of(chat(server, stream=True))
            ]
            return "".join(text) == "ab" * 10

        with ThreadPoolExecutor(24) as threads:
            assert all(threads.map(one, range(150)))
        until(lambda: engine.unfinished == 0 and server.state.admission.used == 0)
        assert server.state.requests == 0 and len(server.state.flights) == 0
    assert threading.active_count() < 40
