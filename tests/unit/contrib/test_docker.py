"""The image and the containers: pinned, not root, with a health check, and with commands that are understood."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.contrib.commands import CONTRIB, ROOT, parsed

DOCKER = CONTRIB / "docker"
PUBLIC_HOST = "203.0.113.7"


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, comments and line continuations resolved."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name.upper(), " ".join(rest.split()))
        for name, _, rest in (line.partition(" ") for line in joined.splitlines())
    ]


def complaints_about(lines: list[tuple[str, str]]) -> list[str]:
    """What hadolint would say, as far as it matters here."""
    said = []
    stages: set[str] = set()
    defaults = {}
    for name, rest in lines:
        if name == "ARG":
            variable, _, default = rest.partition("=")
            defaults[variable] = default
        if name == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], rest.split()[0])
            if image not in stages and (":" not in image or image.endswith(":latest")):
                said.append(f"the image {image} is not pinned")
            stages |= {rest.split()[2]} if " AS " in rest else set()
        if name == "ADD":
            said.append("ADD may fetch and unpack; write COPY")
        if name in ("CMD", "ENTRYPOINT") and not _is_list_of_words(rest):
            said.append(f"{name} is not in exec form: signals would not arrive")
        if name == "HEALTHCHECK" and not _is_list_of_words(rest.partition("CMD ")[2]):
            said.append("HEALTHCHECK is not in exec form")
        if name == "RUN" and "apt-get install" in rest:
            if "--no-install-recommends" not in rest:
                said.append("apt-get installs more than is named")
            if "rm -rf /var/lib/apt/lists/*" not in rest:
                said.append("the lists of apt stay in the image")
        if name == "RUN" and "sudo" in rest.split():
            said.append("sudo")
    names = [name for name, _ in lines]
    last_stage = names[len(names) - names[::-1].index("FROM") :]
    if "USER" not in last_stage or "CMD" not in last_stage or last_stage.index("USER") > last_stage.index("CMD"):
        said.append("no USER before CMD")
    elif dict(lines)["USER"].split(":")[0] in ("root", "0"):
        said.append("the user is root")
    if "HEALTHCHECK" not in last_stage:
        said.append("no HEALTHCHECK")
    return said


def _is_list_of_words(text: str) -> bool:
    try:
        words = json.loads(text)
    except ValueError:
        return False
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


def test_the_lint_finds_no_fault_in_the_dockerfile() -> None:
    lines = instructions(DOCKER / "Dockerfile")
    assert complaints_about(lines) == []
    assert [name for name, _ in lines].count("FROM") >= 3, "what builds the package is not in the image"
    assert any(name == "ENV" and "PIP_NO_CACHE_DIR=1" in rest for name, rest in lines)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("python:3.12-slim-bookworm", "python", "is not pinned"),
        ("python:3.12-slim-bookworm", "python:latest", "is not pinned"),
        ("USER 10001:10001\n", "", "no USER before CMD"),
        ("USER 10001:10001", "USER root", "the user is root"),
        ('ENTRYPOINT ["manyhands"]', "ENTRYPOINT manyhands", "not in exec form"),
        ("COPY src", "ADD src", "ADD"),
        ("--no-install-recommends ", "", "more than is named"),
        ("HEALTHCHECK --interval", "LABEL --interval", "no HEALTHCHECK"),
    ],
)
def test_the_lint_finds_seeded_faults_in_a_dockerfile(before: str, after: str, complaint: str, tmp_path: Path) -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert before in text
    (tmp_path / "Dockerfile").write_text(text.replace(before, after))
    assert any(complaint in said for said in complaints_about(instructions(tmp_path / "Dockerfile")))


def test_the_command_of_the_image_is_understood_and_its_health_is_asked_where_it_answers() -> None:
    lines = dict(instructions(DOCKER / "Dockerfile"))
    assert json.loads(lines["ENTRYPOINT"]) == ["manyhands"]
    words = json.loads(lines["CMD"])
    assert parsed(words)[0] == "monitor"
    port = words[words.index("--web") + 1].rpartition(":")[2]
    check = json.loads(lines["HEALTHCHECK"].partition("CMD ")[2])
    assert check[:2] == ["python3", "-c"]
    compile(check[2], "HEALTHCHECK", "exec")
    assert f"http://127.0.0.1:{port}/healthz" in check[2]
    assert port in lines["EXPOSE"].split()


def test_the_extras_of_the_image_are_there() -> None:
    section = (
        (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    )
    extras = re.findall(r"^(\w+) = \[", section, re.MULTILINE)
    (default,) = [rest for name, rest in instructions(DOCKER / "Dockerfile") if name == "ARG" and "EXTRAS=" in rest]
    assert set(default.partition("=")[2].split(",")) <= set(extras)


def test_the_context_has_all_that_is_copied_and_no_more() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]

    def is_sent(path: str) -> bool:
        sent = True
        for pattern in patterns:  # the last one that matches counts; a folder stands for all in it
            wanted = pattern.removeprefix("!")
            if any(fnmatch.fnmatch(part, wanted) for part in (path, path.split("/")[0])):
                sent = pattern.startswith("!")
        return sent

    copied = [
        word
        for name, rest in instructions(DOCKER / "Dockerfile")
        if name == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    ]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert is_sent(name), name
    for name in (".git", ".venv", "tests", "manyhands-my-albert", "my-run.key", "demo.png"):
        assert not is_sent(name), name


def composed(name: str) -> dict[str, Any]:
    text = (DOCKER / name).read_text()
    text = re.sub(r"\$\{RUN_ID:-([^}]+)\}", r"\1", text)
    text = re.sub(r"\$\{PUBLIC_HOST:\?[^}]+\}", PUBLIC_HOST, text)
    assert "$" not in text
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_the_containers_go_on_by_themselves_and_keep_what_they_have() -> None:
    compose = composed("compose.yaml")
    for name, service in compose["services"].items():
        assert service["restart"] == "unless-stopped", name
        assert service["init"] is True
        assert service["cap_drop"] == ["ALL"]
        assert int(service["stop_grace_period"].removesuffix("s")) >= 60, "it may be saving"
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, "the log of docker is bounded"
        (volume,) = service["volumes"]
        assert volume == f"{name}:/var/lib/manyhands"
        assert name in compose["volumes"]
        for option in ("--state-dir", "--checkpoint-dir", "--events"):
            if option in service["command"]:
                path = service["command"][service["command"].index(option) + 1]
                assert not path.startswith("/"), "in the volume, which is the working directory"
    assert compose["services"]["trainer"]["depends_on"] == {"coordinator": {"condition": "service_healthy"}}


def test_the_commands_of_the_containers_are_understood() -> None:
    services = composed("compose.yaml")["services"]
    command, arguments = parsed(services["coordinator"]["command"])
    assert command == "monitor"
    assert arguments["network"].announce == (f"{PUBLIC_HOST}:31337",)
    command, arguments = parsed(services["trainer"]["command"])
    assert command == "train"
    assert arguments["network"].initial_peers == ("coordinator:31337",)
    assert arguments["network"].announce == (f"{PUBLIC_HOST}:31338",)
    assert arguments["training"].checkpoint_dir == Path("checkpoints")


def test_ports_are_published_where_they_are_needed() -> None:
    services = composed("compose.yaml")["services"]
    for name, port in (("coordinator", "31337"), ("trainer", "31338")):
        assert f"{port}:{port}" in services[name]["ports"]
        command = services[name]["command"]
        assert command[command.index("--listen") + 1] == port
    pages = [port for service in services.values() for port in service["ports"] if "8080" in port]
    assert pages == ["127.0.0.1:8080:8080"], "the page is for this machine alone"
    for service in services.values():  # the health check of the image asks there
        command = service["command"]
        assert command[command.index("--web") + 1].endswith(":8080")


def test_the_containers_with_a_gpu_change_the_base_alone() -> None:
    gpu, plain = composed("compose.gpu.yaml"), composed("compose.yaml")
    assert gpu["services"].keys() == plain["services"].keys()
    arguments = {rest.partition("=")[0] for name, rest in instructions(DOCKER / "Dockerfile") if name == "ARG"}
    built = gpu["services"]["coordinator"]["build"]["args"]
    assert built.keys() <= arguments
    assert ":" in built["BASE"]
    assert not built["BASE"].endswith("latest")
    (device,) = gpu["services"]["trainer"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
