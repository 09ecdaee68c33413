"""A tiny model through the whole engine on the simulated device; a process of its own, so that the guard comes first.

python whole_engine.py FOLDER FAMILY [RANKS]
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace_simulated import guard

guard.install()

from headrace.cli.conformance.local_engine import LocalEngine, greedy  # noqa: E402
from headrace.cli.conformance.models import (  # noqa: E402
    Truth,
    check_answers,
    make_model,
    prompts,
)
from headrace.platforms.probe import load_platform  # noqa: E402

NEW_TOKENS = 8


def main(folder: Path, family: str, ranks: int = 1) -> None:
    from headrace_simulated.runtime import SimGraphs

    backends: list[SimGraphs] = []
    made = SimGraphs.__init__

    def remember(self: SimGraphs) -> None:
        made(self)
        backends.append(self)

    SimGraphs.__init__ = remember  # type: ignore[method-assign]
    model = make_model(family, folder)
    device, host = (load_platform(name).probe()[0] for name in ("sim", "cpu"))
    asked = [prompt for prompt in prompts() if len(prompt) < 64]
    settings = {"max_num_batched_tokens": 32, "tensor_parallel_size": ranks}
    truth = Truth(host)
    with LocalEngine(model, device, **settings) as engine:
        for _ in range(2):  # the second time prefixes are cached
            answers = engine.run(asked, greedy(NEW_TOKENS, logprobs=1))
            _, wrong = check_answers(asked, answers, truth, model, "float32")
            assert not wrong, wrong
        for graph in (graph for backend in backends for graph in backend.captured):
            names = [str(func) for func, *_ in graph._operators]
            # the tables' changes and what was sampled: nothing of a decode is left outside
            assert sum("index_copy_" in name for name in names) == 2, names
        for sizes in ((3, 20), (2, 5, 8)) if ranks == 1 else ():
            step = engine.executor.call("profile_step", *sizes)
            assert len(step["ops"]) > 10 and not step["on_host"], step
            assert all(seconds > 0 for *_, seconds in step["ops"])
    truth.close()
    assert not guard.touched, guard.touched
    if ranks == 1:
        replays = sum(graph.replays for backend in backends for graph in backend.captured)
        assert replays >= NEW_TOKENS, replays


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
