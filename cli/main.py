"""The `headrace` command. Importing this module imports typer and the flag table only: help answers at once.

Each command's work lives in a module of its own and is imported when the command runs.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from headrace.cli import signals
from headrace.cli.bench.command import bench
from headrace.cli.errors import INTERRUPTED, RUNTIME, USAGE, CliError
from headrace.cli.options import Command, Group, with_flags
from headrace.engine.config.flag import DEVICE, LOGGING, MEMORY, MODEL, SCHEDULING, Given

app = typer.Typer(
    name="headrace",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: [bold]headrace serve demo[/bold]",
)
app.add_typer(bench, name="bench")

RUN = (MODEL, DEVICE, MEMORY, SCHEDULING, LOGGING)
_LOGGING_COMMANDS = ("serve", "chat", "complete", "explain")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """One LLM inference server for any accelerator."""


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Folder, .gguf file, hub repository id, or [bold]demo[/bold].",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    str,
    typer.Option(
        metavar="FILE",
        help="YAML file with the same names as the options; options win over it.",
        rich_help_panel="Model",
    ),
]
UrlOption = Annotated[
    str,
    typer.Option(metavar="URL", help="A running server.", show_default="http://127.0.0.1:8000"),
]
KeyOption = Annotated[
    str, typer.Option(metavar="KEY", help="The server's key.", show_default="$HEADRACE_API_KEY")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(cls=Command)
@with_flags()
def serve(
    ctx: typer.Context,
    model: ModelArgument = "",
    config: ConfigOption = "",
    *,
    given: list[Given],
) -> None:
    """Serve a model over the OpenAI API.

    Sizes: 32k = 32,000, 32K = 32,768, 4GiB, 512M. SGLang's names of options work too.

    [bold]headrace serve demo[/bold]

    [bold]headrace serve ./model.gguf --port 9000 --api-key secret[/bold]

    [bold]headrace serve Qwen/Qwen3-0.6B --max-model-len 16k --device cpu[/bold]
    """
    from headrace.cli.serve import run

    run(model, given, config)


@app.command(cls=Command)
@with_flags(RUN)
def chat(
    ctx: typer.Context,
    model: ModelArgument = "",
    url: UrlOption = "",
    key: KeyOption = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="System prompt.")] = "",
    *,
    given: list[Given],
) -> None:
    """Talk to a model: a running server's, or MODEL.

    Ctrl-C stops an answer, Ctrl-D leaves; /help lists the commands.

    [bold]headrace chat demo[/bold]

    [bold]headrace chat --url http://127.0.0.1:8000[/bold]
    """
    from headrace.cli.chat import run

    run(model, url, key, system, given)


@app.command(cls=Command)
@with_flags(RUN)
def complete(
    ctx: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="Text to continue; - or nothing reads it from the input.")
    ] = "-",
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", metavar="MODEL", help="Serve this model privately.")
    ] = "",
    url: UrlOption = "",
    key: KeyOption = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Longest answer.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", show_default="the model's")
    ] = -1.0,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a chat message.")
    ] = False,
    as_json: JsonOption = False,
    given: list[Given],
) -> None:
    """Continue a text once and stop.

    [bold]headrace complete "The capital of France is" -m demo -n 16[/bold]

    [bold]cat notes.txt | headrace complete --chat[/bold]
    """
    from headrace.cli.complete import Request, run

    run(Request(prompt, max_tokens, temperature, as_chat, as_json), model, url, key, given)


@app.command(cls=Command)
def doctor(as_json: JsonOption = False) -> None:
    """Show the devices, versions and memory of this machine, and what is missing.

    [bold]headrace doctor --json[/bold]
    """
    from headrace.cli.doctor import run

    run(as_json)


@app.command(cls=Command)
@with_flags(RUN)
def explain(
    ctx: typer.Context,
    model: ModelArgument = "",
    config: ConfigOption = "",
    as_json: JsonOption = False,
    *,
    given: list[Given],
) -> None:
    """Show which implementation runs each op of a model, and why not the others.

    --device may name hardware that is not here, by platform and architecture.

    [bold]headrace explain demo[/bold]

    [bold]headrace explain demo --device cpu:avx2[/bold]
    """
    from headrace.cli.explain import run

    run(model, given, config, as_json)


@app.command(cls=Command)
def conformance(
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device to test, such as cpu or cuda:1.")
    ] = "auto",
    op: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP",
            help="Only this op, or op=implementation; or one of memory, graphs, collectives, model. May be repeated.",
            show_default="everything",
        ),
    ] = None,
    report: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write the report, as it grows.")
    ] = "",
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest silence of a test.", min=1.0)
    ] = 300.0,
) -> None:
    """Test every implementation that this device's platform lists, chosen or not, against the reference.

    Ends with 1 when a test failed. The report says what ran where: send it to have hardware marked as verified.

    [bold]headrace conformance --json report.json[/bold]

    [bold]headrace conformance --device cuda:0 --op paged_attention[/bold]
    """
    from headrace.cli.conformance.run import run

    run(device, op or [], report, time_limit)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Ends the process: 0, 1 (could not be carried out), 2 (wrong use), 130 (Ctrl-C)."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        signals.watch(signal.SIGINT)
    try:
        code = _run(args)
    except KeyboardInterrupt:  # another one, while the first was dealt with
        code = INTERRUPTED
    finally:
        _no_more_interrupts(process_ends=arguments is None)
    sys.exit(code)


def _no_more_interrupts(process_ends: bool) -> None:
    """The result is known: Ctrl-C must not change it any more, nor the one that was dealt with.

    CPython notes a KeyboardInterrupt that leaves exec() or eval() of a text (dataclasses use that, so any import may)
    and, run with -m, ends by the signal's default action for it even when it was caught later. The next text that
    is run clears the note.
    """
    if process_ends:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    exec("")


def _run(args: list[str]) -> int:
    try:
        code = app(args=args, prog_name="headrace", standalone_mode=False)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return 0
    except Exception as error:
        ended_by = signals.ended_by()
        if ended_by is not None:  # a library made this out of the signal's exception
            return ended_by
        if not isinstance(error, CliError):
            return _unexpected(error, args)
        if error.details:
            print(error.details, file=sys.stderr)
        return _fail(str(error), error.code)
    return code if isinstance(code, int) else 0


def _unexpected(error: Exception, args: Sequence[str]) -> int:
    """Errors of typer itself (they know their text), Ctrl-C inside a prompt, and mistakes of ours."""
    text = getattr(error, "format_message", None)
    if text is not None:
        said = _first_lower(text())
        return (
            _fail(said, USAGE) if said else USAGE
        )  # no command was named: help is all there is to say
    if type(error).__name__ == "Abort":
        return INTERRUPTED
    if _wants_traceback(args):
        raise error
    sentence = " ".join(str(error).split()) or "no message"
    hint = " (--log-level debug shows where)" if args[0] in _LOGGING_COMMANDS else ""
    return _fail(f"{type(error).__name__}: {sentence}{hint}", RUNTIME)


def _wants_traceback(args: Sequence[str]) -> bool:
    return "--log-level=debug" in args or any(
        pair == ("--log-level", "debug") for pair in itertools.pairwise(args)
    )


def _fail(text: str, code: int) -> int:
    print(f"headrace: {text.rstrip()}", file=sys.stderr)
    return code


def _first_lower(text: str) -> str:
    text = text.strip().rstrip(".")
    return text[:1].lower() + text[1:]


def _silence_stdout() -> None:
    """The reader of our output is gone: keep the interpreter from complaining when it flushes at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
