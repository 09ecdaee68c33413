"""Which server a command talks to: the one named by --url, a private one for MODEL, or the local default."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from headrace.cli.api import Address, Api, address
from headrace.cli.errors import CliError
from headrace.engine.config.flag import Given


@contextlib.contextmanager
def connect(model: str, url: str, key: str, given: Sequence[Given]) -> Iterator[tuple[Api, str]]:
    """(client, served model name). A wrong combination of options is refused before anything starts."""
    if model and url:
        raise CliError("MODEL starts a server and --url names one; give one of the two")
    if given and not model:
        typed = ", ".join(row.source.removeprefix("flag ") for row in given)
        raise CliError(
            f"{typed} set up a server, and this command uses a running one; name a MODEL as well"
        )
    with contextlib.ExitStack() as stack:
        where = stack.enter_context(_private(model, given)) if model else address(url, key)
        api = stack.enter_context(Api(where))
        names = api.models()
        if not names:
            raise CliError(f"the server at {where} serves no model")
        yield api, names[0]


@contextlib.contextmanager
def _private(model: str, given: Sequence[Given]) -> Iterator[Address]:
    from headrace.cli.private import server

    with server(model, given) as where:
        yield where
