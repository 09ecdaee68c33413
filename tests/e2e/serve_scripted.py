"""A server process over a scripted engine, for tests of signals: `python serve_scripted.py SOCKET DRAIN_SECONDS [die]`.

With `die` the engine fails a moment after it is ready.
"""

from __future__ import annotations

import asyncio
import sys

from scripted import ByteTokenizer, Script, ScriptedEngine, text_tokens

from headrace.engine.config.settings import EngineConfig, ServerSettings
from headrace.engine.server.run import serve
from headrace.engine.weights.source import ModelFiles


class Dying(ScriptedEngine):
    async def start(self) -> None:
        asyncio.get_running_loop().call_later(0.5, self.fail, "the worker died")


def main() -> int:
    path, drain = sys.argv[1], float(sys.argv[2])
    script = Script(text_tokens("x") * 40, delay=0.05)
    engine = (Dying if "die" in sys.argv else ScriptedEngine)(script)
    config = EngineConfig(server=ServerSettings(uds=path, drain_seconds=drain))
    files = ModelFiles("tiny", "dummy", "", ())
    return serve(config, files, ByteTokenizer(), engine, None)


if __name__ == "__main__":
    sys.exit(main())
