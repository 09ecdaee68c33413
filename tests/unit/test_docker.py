"""docker/: each platform has an image, a compose profile and the same promises. docker/prove.py builds and runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
PLATFORMS = ("cpu", "cuda", "npu", "rocm", "xpu")


def instructions(platform: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile: comments dropped, continued lines joined."""
    lines = (FOLDER / f"{platform}.Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines()]


def final(platform: str) -> list[tuple[str, str]]:
    every = instructions(platform)
    last = max(i for i, (name, _) in enumerate(every) if name == "FROM")
    return every[last:]


def only(found: list[tuple[str, str]], name: str) -> str:
    (value,) = [rest for instruction, rest in found if instruction == name]
    return value


def test_every_platform_has_a_file_and_no_file_is_without_a_platform() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.Dockerfile")) == sorted(PLATFORMS)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_bases_are_pinned_arguments(platform: str) -> None:
    every = instructions(platform)
    base = next(rest for name, rest in every if name == "ARG" and rest.startswith("BASE="))
    assert re.search(r":[\w.-]*\d[\w.-]*$", base) and "latest" not in base
    stages = {"${BASE}"}
    for name, rest in every:
        if name == "FROM":
            source, _, stage = rest.partition(" AS ")
            assert source in stages, source
            stages.add(stage)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_final_stage_has_no_root_no_sources_and_looks_after_itself(platform: str) -> None:
    stage = final(platform)
    user = only(stage, "USER")
    assert (
        user.isdigit() and int(user) > 0
    )  # a number: Kubernetes cannot tell that a name is not root
    for name, rest in stage:
        assert name not in ("COPY", "ADD") or "--from=builder" in rest or "entry.sh" in rest, rest
    assert "/health" in only(stage, "HEALTHCHECK")
    command = json.loads(only(stage, "ENTRYPOINT"))
    entry = FOLDER / command[0]
    if entry.is_file():
        assert "exec headrace serve --host 0.0.0.0" in entry.read_text()
    else:
        assert command == ["headrace", "serve", "--host", "0.0.0.0"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_whatever_is_copied_is_let_through(platform: str) -> None:
    """.dockerignore leaves out all but what it names."""
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert all((ROOT / name).exists() for name in kept)
    needed = {"setup.py", "pyproject.toml", "README.md", "LICENSE", "cli", "engine", "platforms"}
    for name, rest in instructions(platform):
        if name == "COPY" and "--from" not in rest:
            needed |= {source for source in rest.split()[:-1] if source != "."}
    assert needed <= kept


def test_compose() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert sorted(services) == sorted(PLATFORMS)
    for name, service in services.items():
        assert service["profiles"] == [name] and service["image"] == f"headrace:{name}"
        assert service["build"]["dockerfile"] == f"docker/{name}.Dockerfile"
        assert any(volume.endswith(":/models") for volume in service["volumes"])
        assert int(service["stop_grace_period"].removesuffix("s")) > 30  # --shutdown-timeout
        assert name == "cpu" or service.get("devices") or service.get("deploy")


def test_kubernetes() -> None:
    parts = {
        part["kind"]: part for part in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    }
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    paths = {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert {name: container[name]["httpGet"]["path"] for name in paths} == paths
    assert pod["securityContext"]["runAsNonRoot"]
    assert str(pod["securityContext"]["runAsUser"]) == only(final("cpu"), "USER")
    args = container["args"]
    drain = int(args[args.index("--shutdown-timeout") + 1])
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before + drain
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    claim = parts["PersistentVolumeClaim"]["metadata"]["name"]
    assert claim in {v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["volumes"]}
    labels = parts["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert parts["Service"]["spec"]["selector"].items() <= labels.items()
