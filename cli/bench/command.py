from __future__ import annotations

import typer

bench = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Measure a server.")


@bench.command()
def serve() -> None:
    "x"
