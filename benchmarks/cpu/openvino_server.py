"""OpenVINO GenAI behind the one route that the load generator needs, so that all peers are measured through HTTP.

GenAI brings continuous batching but no server. Runs in the peer's own environment with nothing but the standard library
and openvino_genai: `python openvino_server.py FOLDER --port P --threads N`. POST /v1/completions streams; GET /health.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino
import openvino_genai

CACHE_GB = 2


class Engine(threading.Thread):
    """Steps the pipeline while there is work and hands each request's new tokens to its queue; None ends it."""

    def __init__(self, folder: str, threads: int) -> None:
        super().__init__(daemon=True)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_seqs = 256
        scheduler.enable_prefix_caching = True
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.tokenizer = self.pipeline.get_tokenizer()
        self.inbox: queue.Queue[tuple[Any, Any, queue.Queue[list[int] | None]]] = queue.Queue()
        self.numbers = itertools.count()

    def submit(self, ids: Any, config: Any) -> queue.Queue[list[int] | None]:
        tokens: queue.Queue[list[int] | None] = queue.Queue()
        self.inbox.put((ids, config, tokens))
        return tokens

    def run(self) -> None:
        live: list[tuple[Any, queue.Queue[list[int] | None]]] = []
        while True:
            while not live or not self.inbox.empty():  # sleeps when there is nothing to do
                ids, config, tokens = self.inbox.get()
                live.append((self.pipeline.add_request(next(self.numbers), ids, config), tokens))
            self.pipeline.step()
            for handle, tokens in live:
                while handle.can_read():
                    for output in handle.read().values():
                        tokens.put(list(output.generated_ids))
            running = openvino_genai.GenerationStatus.RUNNING
            ended = [pair for pair in live if pair[0].get_status() != running]
            live = [pair for pair in live if pair not in ended]
            for _, tokens in ended:
                tokens.put(None)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._plain(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self._plain(404, {})
            return
        ids = self._ids(body["prompt"])
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body.get("max_tokens", 16)
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = False
        self._stream(ids.shape[1], self.engine.submit(openvino.Tensor(ids), config))

    def _ids(self, prompt: str | list[int]) -> Any:
        """int64 [1, tokens]."""
        if isinstance(prompt, str):
            return np.array(self.engine.tokenizer.encode(prompt).input_ids.data, dtype=np.int64)
        return np.array([prompt], dtype=np.int64)

    def _stream(self, prompt_tokens: int, tokens: queue.Queue[list[int] | None]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        made = 0
        while (new := tokens.get()) is not None:
            made += len(new)
            text = self.engine.tokenizer.decode(new, skip_special_tokens=False)
            self._event({"choices": [{"index": 0, "text": text}]})
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": made}
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _plain(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    Handler.engine = Engine(options.folder, options.threads)
    Handler.engine.start()
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
