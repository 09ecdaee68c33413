"""`headrace bench`: its commands' options. What they do is imported when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.options import Command, Group, with_flags
from headrace.engine.config.flag import DEVICE, LOGGING, MEMORY, MODEL, SCHEDULING, Given

bench = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure a server: its load, its latency, its throughput, its start.",
)

_RUN = (MODEL, DEVICE, MEMORY, SCHEDULING, LOGGING)
_LOAD = "Load"
_OUTPUT = "Output"

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Serve this model privately.", show_default=False),
]
Url = Annotated[
    str, typer.Option(metavar="URL", help="A running server.", show_default="http://127.0.0.1:8000")
]
Key = Annotated[str, typer.Option(metavar="KEY", help="The server's key.", show_default=False)]
PromptTokens = Annotated[
    int, typer.Option(help="Tokens of each prompt, exactly.", rich_help_panel=_LOAD, min=1)
]
OutputTokens = Annotated[
    int, typer.Option(help="Tokens of each answer, exactly.", rich_help_panel=_LOAD, min=1)
]
Requests = Annotated[
    int, typer.Option("--num-requests", help="Requests a level.", rich_help_panel=_LOAD, min=1)
]
Warmup = Annotated[
    int, typer.Option(help="Requests before the clock starts.", rich_help_panel=_LOAD, min=0)
]
SharedPrefix = Annotated[
    int, typer.Option(help="Tokens all prompts begin with.", rich_help_panel=_LOAD, min=0)
]
PromptSeed = Annotated[
    str,
    typer.Option(help="Prompts are a function of it.", rich_help_panel=_LOAD, show_default="new"),
]
JsonFile = Annotated[
    str, typer.Option("--json", metavar="FILE", help="Write the figures.", rich_help_panel=_OUTPUT)
]
PlotFile = Annotated[
    str, typer.Option("--plot", metavar="FILE", help="Draw them.", rich_help_panel=_OUTPUT)
]


@bench.command(cls=Command)
@with_flags(_RUN)
def serve(
    ctx: typer.Context,
    model: Model = "",
    *,
    url: Url = "",
    key: Key = "",
    concurrency: Annotated[
        str,
        typer.Option(
            metavar="N,N", help="Requests under way; one level each.", rich_help_panel=_LOAD
        ),
    ] = "1,4,16",
    request_rate: Annotated[
        float,
        typer.Option(
            metavar="R", help="Arrivals a second instead (Poisson).", rich_help_panel=_LOAD, min=0.0
        ),
    ] = 0.0,
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 128,
    num_requests: Requests = 32,
    warmup: Warmup = 1,
    shared_prefix: SharedPrefix = 0,
    prompt_seed: PromptSeed = "",
    json_file: JsonFile = "",
    plot_file: PlotFile = "",
    given: list[Given],
) -> None:
    """Send streams at several concurrencies, or at a rate, and show rates and percentiles.

    [bold]headrace bench serve demo --concurrency 1,8[/bold]

    [bold]headrace bench serve --url http://127.0.0.1:8000 --request-rate 4[/bold]
    """
    from headrace.cli.bench import run

    base = run.load(prompt_tokens, output_tokens, num_requests, warmup, shared_prefix, prompt_seed)
    levels = run.levels(base, concurrency, request_rate)
    run.bench("serve", run.Target(model, url, key, given), levels, run.Output(json_file, plot_file))


@bench.command(cls=Command)
@with_flags(_RUN)
def latency(
    ctx: typer.Context,
    model: Model = "",
    *,
    url: Url = "",
    key: Key = "",
    prompt_tokens: Annotated[
        str,
        typer.Option(
            metavar="N,N", help="Tokens of the prompts; one level each.", rich_help_panel=_LOAD
        ),
    ] = "32,128,512",
    output_tokens: OutputTokens = 64,
    num_requests: Requests = 5,
    warmup: Warmup = 1,
    prompt_seed: PromptSeed = "",
    json_file: JsonFile = "",
    plot_file: PlotFile = "",
    given: list[Given],
) -> None:
    """One request at a time, for several prompt lengths.

    [bold]headrace bench latency demo --prompt-tokens 64,1024[/bold]
    """
    from headrace.cli.bench import run

    levels = [
        run.load(tokens, output_tokens, num_requests, warmup, 0, prompt_seed)
        for tokens in run.numbers("--prompt-tokens", prompt_tokens)
    ]
    named = {f"{level.prompt_tokens} prompt tokens": level for level in levels}
    run.bench(
        "latency", run.Target(model, url, key, given), named, run.Output(json_file, plot_file)
    )


@bench.command(cls=Command)
@with_flags(_RUN)
def throughput(
    ctx: typer.Context,
    model: Model = "",
    *,
    url: Url = "",
    key: Key = "",
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 128,
    num_requests: Requests = 64,
    warmup: Warmup = 1,
    shared_prefix: SharedPrefix = 0,
    prompt_seed: PromptSeed = "",
    json_file: JsonFile = "",
    plot_file: PlotFile = "",
    given: list[Given],
) -> None:
    """All requests at once: how many tokens a second the server makes at most.

    [bold]headrace bench throughput demo --num-requests 32[/bold]
    """
    from headrace.cli.bench import run

    base = run.load(prompt_tokens, output_tokens, num_requests, warmup, shared_prefix, prompt_seed)
    levels = run.levels(base, str(num_requests), 0.0)
    run.bench(
        "throughput", run.Target(model, url, key, given), levels, run.Output(json_file, plot_file)
    )


@bench.command(cls=Command)
@with_flags(_RUN)
def startup(
    ctx: typer.Context,
    model: Model = "demo",
    config: Annotated[str, typer.Option(metavar="FILE", help="YAML file of settings.")] = "",
    repeats: Annotated[int, typer.Option(help="Starts to measure.", min=1)] = 3,
    idle_seconds: Annotated[
        float, typer.Option(help="How long to watch the idle server.", min=0.1)
    ] = 10.0,
    json_file: JsonFile = "",
    *,
    given: list[Given],
) -> None:
    """Seconds until serve is ready and until its first token, its memory and its idle load.

    [bold]headrace bench startup demo --repeats 5[/bold]
    """
    from headrace.cli.bench import run

    run.startup(model, given, config, (repeats, idle_seconds), json_file)


@bench.command(cls=Command)
@with_flags(_RUN)
def perplexity(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="[MODEL]", help="Serve this model privately.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="A text.", show_default=False)] = "",
    *,
    url: Url = "",
    key: Key = "",
    context: Annotated[
        int, typer.Option(help="Tokens of a window.", show_default="512", min=0)
    ] = 0,
    stride: Annotated[
        int,
        typer.Option(
            help="A window begins every so many tokens.", show_default="half of it", min=0
        ),
    ] = 0,
    json_file: JsonFile = "",
    given: list[Given],
) -> None:
    """How well the model predicts a text: perplexity with its standard error. Lower is better.

    [bold]headrace bench perplexity demo book.txt --quantization int8[/bold]

    [bold]headrace bench perplexity book.txt --url http://127.0.0.1:8000[/bold]
    """
    from headrace.cli.bench import run

    model, file = (model, file) if file else ("", model)
    run.perplexity(run.Target(model, url, key, given), file, (context, stride), json_file)


@bench.command(cls=Command)
@with_flags(_RUN)
def profile(
    ctx: typer.Context,
    model: Model = "",
    *,
    url: Url = "",
    key: Key = "",
    requests: Annotated[
        str,
        typer.Option(
            metavar="N,N", help="Requests in a step; a table each.", rich_help_panel=_LOAD
        ),
    ] = "1,4,16",
    context: Annotated[
        int, typer.Option(help="Tokens that each request has.", rich_help_panel=_LOAD, min=0)
    ] = 256,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            help="Read so many tokens of each request's prompt instead of decoding.",
            rich_help_panel=_LOAD,
            min=0,
        ),
    ] = 0,
    decodes: Annotated[
        int,
        typer.Option(
            help="So many others decode beside those that read a prompt.",
            rich_help_panel=_LOAD,
            min=0,
        ),
    ] = 0,
    json_file: JsonFile = "",
    chrome_trace: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Write a trace for Perfetto, one for each number of requests.",
            rich_help_panel=_OUTPUT,
        ),
    ] = "",
    given: list[Given],
) -> None:
    """Where a step's time goes, op by op and kernel by kernel, against memory's and arithmetic's limits; and what the
    host does meanwhile.

    [bold]headrace bench profile demo --requests 1,8 --chrome-trace trace.json[/bold]
    """
    from headrace.cli.bench import run

    sizes = {"context": context, "prompt": prompt_tokens, "decodes": decodes}
    loads = [{"requests": count, **sizes} for count in run.numbers("--requests", requests)]
    run.profile(run.Target(model, url, key, given), loads, run.TraceOutput(json_file, chrome_trace))


@bench.command(cls=Command)
@with_flags(_RUN)
def tune(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model.", show_default=False)],
    *,
    seconds: Annotated[float, typer.Option(help="How long to try.", min=1.0)] = 300.0,
    output: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Write the options there.",
            rich_help_panel=_OUTPUT,
            show_default="where the next start finds them",
        ),
    ] = "",
    json_file: JsonFile = "",
    given: list[Given],
) -> None:
    """Time launch options of the kernels, and other implementations of attention, for this model on this device; the
    next start takes the fastest.

    [bold]headrace bench tune ./Qwen3-30B-A3B --seconds 600[/bold]
    """
    from headrace.cli.bench import run

    run.tune(model, given, (seconds, output), json_file)
