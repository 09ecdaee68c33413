"""Help, names of options, completion, version: what answers before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.cli import main as cli
from headrace.cli.options import flags_of
from headrace.engine.config.flags import FLAGS

HEAVY = (
    "torch",
    "fastapi",
    "uvicorn",
    "transformers",
    "numpy",
    "pydantic",
    "httpx",
    "tokenizers",
    "zmq",
)
COMMANDS = (
    ("serve",),
    ("chat",),
    ("complete",),
    ("doctor",),
    ("explain",),
    ("bench",),
    ("bench", "serve"),
    ("bench", "latency"),
    ("bench", "throughput"),
    ("bench", "startup"),
    ("bench", "perplexity"),
    ("bench", "profile"),
    ("bench", "tune"),
)


def run(*args: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of a command run in this process; its exit code is checked."""
    with pytest.raises(SystemExit) as ended:
        cli.main(args)
    out, err = capsys.readouterr()
    assert ended.value.code == code, err
    return out, err


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")


@pytest.mark.parametrize("args", [(), ("serve",), ("bench",), ("bench", "serve")], ids=" ".join)
def test_help_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    script = (
        "import sys\n"
        "from headrace.cli.main import main\n"
        "try:\n"
        f"    main({[*args, '--help']!r})\n"
        "except SystemExit as end:\n"
        f"    print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules], end.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY [] 0", done.stderr
    assert "Usage:" in done.stdout


@pytest.mark.parametrize("module", ["serve", "prepare"])
def test_nothing_heavy_is_imported_before_the_engine_starts(module: str) -> None:
    heavy = (*HEAVY, "numpy", "zmq")
    script = f"import sys, headrace.cli.{module}\nprint([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = run(*command, "--help", capsys=capsys)
    assert f"Usage: headrace {' '.join(command)}" in out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != ("bench",)], ids=" ".join)
def test_help_shows_an_example(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = run(*command, "--help", capsys=capsys)
    body = out.split("Usage:", 1)[1].split("\n", 1)[1]
    assert f"headrace {' '.join(command)}" in body


def test_serve_help_has_every_flag_with_its_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run("serve", "--help", capsys=capsys)
    for flag in flags_of():
        for name in (flag.name, *flag.aliases, *flag.negatives):
            assert name in out, name
        assert flag.help.split()[0] in out
    assert {flag.name for flag in FLAGS} - {flag.name for flag in flags_of()} == {"--model"}


@pytest.mark.parametrize("args", [(), ("bench",)], ids=["headrace", "bench"])
def test_no_command_is_answered_with_help_alone(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = run(*args, capsys=capsys, code=2)
    assert "Usage:" in out + err and "headrace: " not in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert run("--version", capsys=capsys)[0] == f"headrace {version('headrace')}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    script = "import sys; from headrace.cli.main import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"_HEADRACE_COMPLETE": f"source_{shell}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "_HEADRACE_COMPLETE" in done.stdout and "headrace" in done.stdout


@pytest.mark.parametrize(
    ("words", "current", "expected"),
    [
        ("headrace ser", 1, {"serve"}),
        ("headrace serve --max-model", 2, {"--max-model-len"}),
        ("headrace serve --dtype b", 3, {"bfloat16"}),
        ("headrace bench st", 2, {"startup"}),
    ],
)
def test_completion(words: str, current: int, expected: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from headrace.cli.main import main; main([])"],
        env={
            "_HEADRACE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(current),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("serve", "--max-model-length", "3"), "did you mean --max-model-len?"),
        (("serve", "--max_model_lenn=3"), "did you mean --max-model-len?"),
        (("serve", "--kontext-length", "3"), "did you mean --context-length?"),
        (("chat", "--max-logprobs", "3"), "unknown option --max-logprobs"),
        (("bench", "serve", "--concurency", "3"), "did you mean --concurrency?"),
        (("bench", "latency", "--nosuch"), "(headrace bench latency --help lists them)"),
        (("serve", "--nosuchthing"), "(headrace serve --help lists them)"),
        (("doctor", "--jsn"), "did you mean --json?"),
        (("serv",), "unknown command serv; did you mean serve?"),
        (("bench", "zzz"), "unknown command zzz; there are serve, latency, throughput, startup"),
        (("--versoin",), "--versoin"),
        (("serve", "--port"), "--port"),
        (("serve", "a", "b"), "unexpected extra argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_use_is_one_line_and_exit_code_2(
    args: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = run(*args, capsys=capsys, code=2)
    assert words in err
    assert err.startswith("headrace: ") and err.count("\n") == 1
