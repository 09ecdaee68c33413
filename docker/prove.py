"""Shows that what lies in this folder works; needs neither a Docker engine nor an accelerator.

    pip install -r docker/requirements.txt && python docker/prove.py lint compose kubernetes
    apt-get install buildah debootstrap
    python docker/prove.py image serve torch-stays others  (as root)

`lint`: hadolint on the Dockerfiles, shellcheck on the scripts. `compose`: each profile by `docker-compose config`.
`kubernetes`: the strict schemas of Kubernetes. `image`: the CPU image is built on a base that debootstrap makes.
`serve`: its own command serves the demo as its own user, the official client asks it, its own health check looks at it,
SIGTERM ends it with 0. `torch-stays`: the images for NVIDIA and AMD on a stand-in base whose virtual environment
carries a torch of another version: the built image imports that one. `others`: those for NVIDIA, AMD, Intel, Ascend
on Debian, with the CPU build of torch and without what only a vendor distributes: every step of their Dockerfiles
is executed, and what comes out serves on the CPU, as `serve` says. Builds and runs are buildah's with chroot isolation;
pip inside them is set up as it is here. Besides requirements.txt: openai and psutil.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PLATFORMS = ("cpu", "cuda", "rocm", "xpu", "npu")
BASE = "localhost/headrace-base:bookworm"
STAND_IN = "localhost/headrace-base:torch"
STAND_IN_VERSION = "2.11.0+standin"
CPU_IMAGE = "localhost/headrace:cpu"
USER = 10001
# without the second sentence two first tokens are 0.08 apart, and bfloat16 tells them apart by chance
QUESTION = "What is the capital of France? Answer in one sentence."
# A base image with a torch in a virtual environment of its own: all that installers see of it, none of its weight.
STAND_IN_FILE = f"""
FROM {BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN cd /opt/venv/lib/python3*/site-packages && mkdir torch torch-{STAND_IN_VERSION}.dist-info \\
    && echo '__version__ = "{STAND_IN_VERSION}"' > torch/__init__.py \\
    && printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: {STAND_IN_VERSION}\\n' \\
        > torch-{STAND_IN_VERSION}.dist-info/METADATA
"""


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def call(*command: str | Path, quiet: bool = False) -> str:
    """Run a command to its end; its output. Ends the proof when it fails."""
    words = [str(word) for word in command]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stdout + result.stderr)[-4000:]
        sys.exit(f"{' '.join(words)}\n{said}\nended with {result.returncode}")
    if not quiet and (text := (result.stdout + result.stderr).strip()):
        print(text)
    return result.stdout


def tool(name: str, way_out: str = "pip install -r docker/requirements.txt") -> str:
    """Where a program is: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    return found or sys.exit(f"{name} is not installed: {way_out}")


def lint() -> None:
    files = [HERE / f"{name}.Dockerfile" for name in PLATFORMS]
    call(tool("hadolint"), "-c", HERE / ".hadolint.yaml", *files)
    call(tool("shellcheck"), *sorted(HERE.glob("*.sh")))
    print(f"hadolint: {len(files)} Dockerfiles clean; shellcheck: scripts clean")


def compose() -> None:
    for name in PLATFORMS:
        command = (tool("docker-compose"), "-f", HERE / "compose.yaml", "--profile", name, "config")
        services = yaml.safe_load(call(*command, quiet=True))["services"]
        if list(services) != [name]:
            sys.exit(f"profile {name} has the services {list(services)}")
    print(f"docker-compose config: profiles {', '.join(PLATFORMS)} valid")


def kubernetes() -> None:
    call(tool("kubernetes-validate"), "--strict", HERE / "kubernetes.yaml")


class Buildah:
    """buildah without an engine, its storage under `work`; pip in its containers set up as this Python's."""

    def __init__(self, work: Path) -> None:
        program = tool("buildah", "apt-get install buildah debootstrap")
        self.work = work
        storage = ("--root", str(work / "storage"), "--runroot", str(work / "run"))
        self.program = (program, "--storage-driver", "vfs", *storage)
        self.isolated = ("--isolation", "chroot", *self._pip_settings())

    def _pip_settings(self) -> list[str]:
        """`--volume` flags: this machine's pip configuration, and the files and folders that it names."""
        listed = call(sys.executable, "-m", "pip", "config", "list", quiet=True)
        lines, paths = {}, {"/etc/ssl/certs"}
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            value = value.strip("'\"")
            key = name.rpartition(".")[2]
            lines[key] = (
                f"{key} = {value}"  # variables come first in pip's list and last in its word
            )
            for word in value.split():
                path = Path(word.removeprefix("file://"))
                if path.name == "simple":  # an index refers to the files beside it
                    path = path.parent
                if (
                    path.is_absolute()
                    and path.exists()
                    and not path.is_relative_to("/etc/ssl/certs")
                ):
                    paths.add(str(path))
        configuration = self.work / "pip.conf"
        configuration.write_text("\n".join(["[global]", *lines.values(), ""]))
        mounts = {str(configuration): "/etc/pip.conf", **{path: path for path in paths}}
        return [f"--volume={source}:{target}:ro" for source, target in mounts.items()]

    def __call__(self, *args: str | Path, quiet: bool = True) -> str:
        return call(*self.program, *args, quiet=quiet)

    def has(self, image: str) -> bool:
        return image in self("images", "--format", "{{.Name}}:{{.Tag}}").split()

    def base(self) -> None:
        """Debian with Python, made by debootstrap: what a Dockerfile gets as BASE here."""
        if self.has(BASE):
            return
        tree = self.work / "base"
        shutil.rmtree(tree, ignore_errors=True)
        program = tool("debootstrap", "apt-get install buildah debootstrap")
        packages = "--include=python3,ca-certificates"
        say(f"base image by debootstrap: {BASE}")
        call(program, "--variant=minbase", packages, "bookworm", tree, quiet=True)
        shutil.rmtree(tree / "var/lib/apt/lists")
        for archive in (tree / "var/cache/apt/archives").glob("*.deb"):
            archive.unlink()
        # as in the images of Debian: no waiting for the disk after each file of a package
        (tree / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
        container = self("from", "scratch").strip()
        self("add", "--quiet", container, tree, "/")
        self("commit", "--quiet", container, BASE)
        self("rm", container)
        shutil.rmtree(tree)

    def build(self, name: str, file: Path, *args: str, context: Path = ROOT) -> float:
        """Build an image; its size in MB."""
        say(f"building {name} from {file.name}")
        begin = time.monotonic()
        flags = [
            *self.isolated,
            "--format",
            "docker",
            "--layers=false",
            "--file",
            file,
            "--tag",
            name,
        ]
        log = call(*self.program, "build", *flags, *args, context, quiet=True)
        (self.work / "build.log").write_text(log)
        (row,) = json.loads(self("images", "--json", name))
        size = row["size"]
        print(f"{name}: {size}, built in {time.monotonic() - begin:.0f} s")
        return size

    def settings(self, image: str) -> dict:
        """User, entry point, command, health check and the like, as the image says."""
        return json.loads(self("inspect", "--type", "image", image))["Docker"]["config"]


def free_port(wanted: int = 8000) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise AssertionError("a free port is always found")


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 600
    while True:
        try:
            with urllib.request.urlopen(url + "/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.3)
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            sys.exit(f"the image's command did not become ready:\n{log.read_text()}")


def server_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The server below `buildah run`: the image's user's first process that is none of buildah's own."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.uids().real == USER and not child.cmdline()[0].startswith("buildah"):
            return child
    sys.exit(f"no process of user {USER} below buildah")


def ask(url: str) -> str:
    import openai

    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=64,
    )
    text = answer.choices[0].message.content or ""
    if "Paris" not in text:
        sys.exit(f"{QUESTION} {text}")
    return text


def serve(buildah: Buildah, image: str = CPU_IMAGE, *options: str) -> None:
    """What `image` built: its command as its user, asked, looked at by its health check, ended by SIGTERM."""
    settings = buildah.settings(image)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    models = buildah.work / "models"
    models.mkdir(exist_ok=True)
    shutil.chown(models, USER, USER)
    container = buildah("from", image).strip()
    command = [*settings["Entrypoint"], *settings["Cmd"], "--port", str(port), *options]
    flags = [*buildah.isolated, f"--volume={models}:/models"]
    log = buildah.work / "serve.log"
    say(f"user {settings['User']}: {' '.join(command)}")
    with log.open("wb") as output:
        words = [*buildah.program, "run", *flags, container, "--", *command]
        process = subprocess.Popen(words, stdout=output, stderr=output)
    try:
        wait_ready(url, process, log)
        server = server_of(process)
        uids = {child.uids().real for child in (server, *server.children(recursive=True))}
        print(f"answer: {ask(url)}\nprocesses belong to {uids}")
        kind, *check = settings["Healthcheck"]["Test"]
        words = [word.replace(":8000/", f":{port}/") for word in check]
        if kind != "CMD" or uids != {USER}:
            sys.exit(f"health check {kind}, users {uids}")
        buildah("run", *flags, container, "--", *words)
        print("health check while it serves: 0")
        server.terminate()
        code = process.wait(60)
        print(f"exit code after SIGTERM: {code}")
        again = [*buildah.program, "run", *flags, container, "--", *words]
        after = subprocess.run(again, capture_output=True, check=False).returncode
        print(f"health check after it ended: {after}")
        if code or not after:
            sys.exit(log.read_text())
    finally:
        process.kill()
        buildah("rm", container)


def image(buildah: Buildah) -> None:
    buildah.base()
    # no index of its own: pip as it is set up here
    arguments = ("--build-arg", f"BASE={BASE}", "--build-arg", "TORCH_INDEX=")
    buildah.build(CPU_IMAGE, HERE / "cpu.Dockerfile", *arguments)


def torch_stays(buildah: Buildah) -> None:
    buildah.base()
    stand_in = buildah.work / "stand-in.Dockerfile"
    stand_in.write_text(STAND_IN_FILE)
    empty = buildah.work / "empty"
    empty.mkdir(exist_ok=True)
    if not buildah.has(STAND_IN):
        buildah.build(STAND_IN, stand_in, context=empty)
    for platform in ("cuda", "rocm"):
        name = f"localhost/headrace:{platform}-stand-in"
        file = HERE / f"{platform}.Dockerfile"
        buildah.build(name, file, "--build-arg", f"BASE={STAND_IN}")
        container = buildah("from", name).strip()
        program = "import torch, headrace.cli.main as h; print(torch.__version__, torch.__file__, h.__file__)"
        said = buildah("run", "--isolation", "chroot", container, "--", "python", "-c", program)
        packages = buildah(
            "run", "--isolation", "chroot", container, "--", "ls", "/opt/headrace/lib"
        )
        buildah("rm", container)
        print(said.strip())
        if not said.startswith(f"{STAND_IN_VERSION} /opt/venv/") or re.search("nvidia", packages):
            sys.exit(f"{name}: the base's torch did not stay")


def others(buildah: Buildah) -> None:
    buildah.base()
    without: dict[str, dict[str, str]] = {
        "cuda": {},
        "rocm": {},
        "xpu": {"TORCH_INDEX": "", "DRIVER": ""},
        "npu": {"TORCH_INDEX": ""},
    }
    for platform, arguments in without.items():
        name = f"localhost/headrace:{platform}-on-debian"
        given = {"BASE": BASE, **arguments}
        flags = [word for key, value in given.items() for word in ("--build-arg", f"{key}={value}")]
        buildah.build(name, HERE / f"{platform}.Dockerfile", *flags)
        serve(buildah, name, "--device", "cpu")
        buildah("rmi", name)  # a GB or more each


def main(words: Sequence[str] | None = None) -> None:
    light: dict[str, Callable[[], None]] = {
        "lint": lint,
        "compose": compose,
        "kubernetes": kubernetes,
    }
    heavy: dict[str, Callable[[Buildah], None]] = {
        "image": image,
        "serve": serve,
        "torch-stays": torch_stays,
        "others": others,
    }
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=[*light, *heavy])
    parser.add_argument(
        "--work", type=Path, default="/var/tmp/headrace-docker", help="folder for images and logs"
    )
    given = parser.parse_args(words)
    for what in given.what:
        say(what)
        if what in light:
            light[what]()
        else:
            given.work.mkdir(parents=True, exist_ok=True)
            heavy[what](Buildah(given.work))


if __name__ == "__main__":
    main()
