"""What the HTTP tests share: reading event streams, and the check that follows every bad request."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.e2e.scripted import Live

USER = [{"role": "user", "content": "hi"}]


def events(text: str) -> list[Any]:
    """The data of an event stream's events; a terminator is the string "[DONE]"."""
    found = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: ") and "\n" not in block, block
            data = block[len("data: ") :]
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chat(server: Live, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/chat/completions", json={"messages": USER, **fields})


def complete(server: Live, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/completions", json={"prompt": "abc", **fields})


def stream_of(response: httpx.Response) -> list[Any]:
    """Events of a good stream, without the terminator."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert found[-1] == "[DONE]"
    return found[:-1]


def refused(
    response: httpx.Response, status: int = 400, param: str | None = None
) -> dict[str, Any]:
    """An OpenAI error object with this status; `param` "" = any."""
    assert response.status_code == status, (response.status_code, response.text)
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.content.decode("utf-8"))
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error


def still_fine(server: Live) -> None:
    assert chat(server).status_code == 200
