"""Parts of the HTTP server on their own: fields, names, defaults, admission, flights, keys, sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config.settings import ServerSettings
from headrace.engine.ipc.client import EngineDead
from headrace.engine.server.admission import Admission
from headrace.engine.server.body import depth_over, parse_body
from headrace.engine.server.defaults import read_defaults
from headrace.engine.server.errors import ApiError, sentence
from headrace.engine.server.fields import HARMLESS, UNSUPPORTED
from headrace.engine.server.flights import ClientGone, Flights
from headrace.engine.server.names import ModelNames
from headrace.engine.server.params import SamplingDefaults, Seeds, check_logit_bias, room_for
from headrace.engine.server.protocol import ChatRequest, CompletionRequest
from headrace.engine.server.sockets import BindError, bind, close, url_of


def test_every_field_has_one_meaning() -> None:
    for kind in (ChatRequest, CompletionRequest):
        fields = set(kind.__struct_fields__)
        assert not fields & HARMLESS and not fields & set(UNSUPPORTED)
    assert not HARMLESS & set(UNSUPPORTED)


@pytest.mark.parametrize(
    ("value", "limit", "over"),
    [
        ({}, 1, False),
        ({"a": 1}, 1, False),
        ({"a": []}, 1, True),
        ([[1], [[2]]], 3, False),
        ([[[2]]], 2, True),
    ],
)
def test_nesting(value: Any, limit: int, over: bool) -> None:
    assert depth_over(value, limit) is over


def test_a_servers_seed_fixes_the_sequence_of_seeds() -> None:
    def first(seed: int | None) -> list[int]:
        seeds = Seeds(seed)
        return [seeds.draw() for _ in range(100)]

    assert first(7) == first(7) != first(8)
    assert first(0) == first(0) and first(None) != first(None)
    assert len(set(first(7))) == 100 and all(0 <= seed < 2**63 for seed in first(7))
    assert not set(first(7)) & set(first(8)), "neighbouring seeds share nothing"


def test_error_messages_are_utf8_and_one_sentence() -> None:
    error = ApiError(400, "half \ud83d here", param="\udcaa")
    assert json.loads(error.response().body)["error"]["message"] == "half ? here"
    assert sentence("it broke") == "It broke." and sentence("Why?") == "Why?"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": [{"role": 1}], "n": "x"}', "n"),
        (b'{"messages": 5}', "messages"),
        (
            b'{"messages": [], "stream_options": {"include_usage": 1}}',
            "stream_options.include_usage",
        ),
        (b"{}", "messages"),
        (b'{"messages": [], "stop": [1]}', "stop[0]"),
    ],
)
def test_wrong_types_name_their_place(body: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(body, ChatRequest, 64)
    assert caught.value.param == param and caught.value.status == 400


def test_names() -> None:
    hub = ModelNames("org/model")
    assert hub.listed == ("org/model",) and hub.check(None) == "org/model"
    assert hub.check("model") == "model"  # the last component is understood
    path = ModelNames("/somewhere/model-folder/")
    assert path.listed == ("model-folder",)
    served = ModelNames("org/model", ("a", "b", "a"))
    assert served.listed == ("a", "b") and served.check(None) == "a"
    with pytest.raises(ApiError) as caught:
        served.check("org/model")
    assert caught.value.status == 404 and caught.value.code == "model_not_found"


def test_defaults_from_generation_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": 7, "min_p": "x", "eos_token_id": 2}'
    )
    assert read_defaults(str(path)) == SamplingDefaults(temperature=0.6, top_k=20)
    assert "top_p" in caplog.text and "min_p" in caplog.text
    for text in ("{", "[]", '{"temperature": NaN}'):
        path.write_text(text)
        assert read_defaults(str(path)) == SamplingDefaults()
    assert read_defaults("") == read_defaults(str(tmp_path / "none")) == SamplingDefaults()


def test_logit_bias_keys() -> None:
    assert check_logit_bias({"5": 1.0, "0": -100}, 10) == {5: 1.0, 0: -100}
    for key in ("10", "-1", "1.0", "", " 1", "٣", "9" * 5000, "0x1"):
        with pytest.raises(ApiError):
            check_logit_bias({key: 1.0}, 10)


def test_room() -> None:
    assert room_for(3, None, 10, "prompt") == 7
    assert room_for(3, 100, 10, "prompt") == 7
    assert room_for(9, 5, 10, "prompt") == 1
    assert room_for(3, 0, 10, "prompt") == 0
    with pytest.raises(ApiError, match="10"):
        room_for(10, 1, 10, "prompt")


def test_admission() -> None:
    admission = Admission(3)
    first = admission.admit(2)
    with pytest.raises(ApiError) as caught:
        admission.admit(2)
    assert caught.value.status == 429 and caught.value.headers["Retry-After"]
    first.release()
    second = admission.admit(2)
    first.close()
    first.close()
    first.release()
    assert admission.used == 2
    second.close()
    assert admission.used == 0


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


def test_flights_end_work_for_whatever_reason() -> None:
    async def main() -> None:
        flights, ended = Flights(), []

        async def work(seconds: float = 60, error: Exception | None = None) -> str:
            try:
                await asyncio.sleep(seconds)
            finally:
                ended.append(1)
            if error:
                raise error
            return "done"

        assert await flights.run(never, work(0)) == "done"
        with pytest.raises(ClientGone):
            await flights.run(gone, work())
        with pytest.raises(ApiError) as caught:
            await flights.run(never, work(0, EngineDead("it died")))
        assert caught.value.status == 503 and caught.value.message == "It died."
        running = [asyncio.ensure_future(flights.run(never, work())) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert len(flights) == 3
        flights.fail_all(ApiError(503, "closing"))
        for task in running:
            with pytest.raises(ApiError, match="closing"):
                await task
        with pytest.raises(ApiError, match="closing"):
            await flights.run(never, work())
        assert len(ended) == 6 and len(flights) == 0

    asyncio.run(main())


def test_flights_pass_an_outer_cancellation_on() -> None:
    async def main() -> None:
        flights = Flights()
        task = asyncio.ensure_future(flights.run(never, asyncio.sleep(60)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(flights) == 0

    asyncio.run(main())


def test_bind(tmp_path: Path) -> None:
    first = bind(ServerSettings(port=0))
    port = first.getsockname()[1]
    assert url_of(first) == f"http://127.0.0.1:{port}"
    with pytest.raises(BindError, match=f"{port}.*--port"):
        bind(ServerSettings(port=port))
    first.close()
    with pytest.raises(BindError):
        bind(ServerSettings(host="no.such.host.invalid"))


def test_bind_unix(tmp_path: Path) -> None:
    settings = ServerSettings(uds=str(tmp_path / "s"))
    first = bind(settings)
    assert url_of(first) == f"unix:{settings.uds}"
    with pytest.raises(BindError, match="--uds"):
        bind(settings)  # somebody listens
    first.close()  # and leaves the file behind, as a killed server does
    second = bind(settings)
    close(second, settings)
    assert not Path(settings.uds).exists()
    Path(settings.uds).write_text("a file of somebody's")
    with pytest.raises(BindError):
        bind(settings)
    assert Path(settings.uds).read_text()


def test_tcp_sockets_say_so() -> None:
    """Else event loops leave Nagle's algorithm on, which holds small writes back for 40 ms."""
    sock = bind(ServerSettings(port=0))
    assert sock.proto == socket.IPPROTO_TCP
    sock.close()


def test_the_server_never_imports_torch() -> None:
    code = "import sys, headrace.engine.server.run; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
