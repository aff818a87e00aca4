"""A fake AWS (moto, in this process), and what machines would run there."""

from __future__ import annotations

import base64
import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import boto3
from botocore.loaders import JSONFileLoader, Loader
from moto import mock_aws

from manyhands.cli.main import run as run_command

REGION = "us-east-1"
UBUNTU = "ami-1e749f67"
"""An image of Ubuntu that the fake knows."""


SOURCE = "git+https://example.org/it's.git"
IMAGES = ("--image", UBUNTU, "--cpu-image", UBUNTU)


_load_file = functools.cache(JSONFileLoader().load_file)


class _ReadOnce(JSONFileLoader):
    """Each session of boto3 reads its descriptions of AWS anew, 10 MB of EC2 alone."""

    def load_file(self, file_path: str) -> Any:
        return _load_file(file_path)


Loader.FILE_LOADER_CLASS = _ReadOnce


@functools.cache
def scripts_of(*options: str) -> dict[str, str]:
    """The scripts that machines run at their first start, by role, as the fake makes them from the template.

    The private address of the coordinator is replaced by its role.

    Args:
        options: those of ``manyhands aws up`` for the experiment x.
    """
    with mock_aws():
        assert run_command(["aws", "up", "--name", "x", "--region", REGION, *IMAGES, "--source", SOURCE, *options]) == 0
        ec2 = boto3.client("ec2", REGION)
        (coordinator,) = [one for one in instances(ec2) if role_of(one) == "coordinator"]
        data = ec2.describe_instance_attribute(InstanceId=coordinator["InstanceId"], Attribute="userData")
        scripts = {"coordinator": data["UserData"]["Value"]}
        for template in ec2.describe_launch_templates()["LaunchTemplates"]:
            versions = ec2.describe_launch_template_versions(LaunchTemplateId=template["LaunchTemplateId"])
            data = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]
            scripts["auxiliary" if "InstanceType" in data else "worker"] = data["UserData"]
        address = coordinator["PrivateIpAddress"]
        texts = {role: base64.b64decode(script).decode() for role, script in scripts.items()}
        return {role: text.replace(address, "coordinator") for role, text in texts.items()}


def instances(ec2: Any, *states: str) -> list[dict[str, Any]]:
    filters = [{"Name": "instance-state-name", "Values": list(states)}] if states else []
    reservations = ec2.describe_instances(Filters=filters)["Reservations"]
    return [one for reserved in reservations for one in reserved["Instances"]]


def role_of(instance: dict[str, Any]) -> str:
    return {tag["Key"]: tag["Value"] for tag in instance["Tags"]}["manyhands:role"]


def set_up(script: str, folder: Path, *, pip: str = "", public: str = "exit 22") -> subprocess.CompletedProcess[str]:
    """Run a machine's script in a folder, with fakes of all that it installs; the pauses are left out."""
    for name in ("fakes", "etc/systemd/system", "opt/manyhands/bin", "root"):
        (folder / name).mkdir(parents=True)
    answers = f"case $* in *token) echo t;; *public-ipv4) {public};; *local-ipv4) echo 172.31.0.9;; esac"
    fakes = {name: f"echo {name} $*" for name in ("apt-get", "useradd", "systemctl", "python3", "sleep", "tc")}
    for name, body in (fakes | {"curl": answers, "ip": "echo default via 172.31.0.1 dev ens5"}).items():
        write_script(folder / "fakes" / name, body)
    write_script(folder / "opt/manyhands/bin/pip", f"{pip}\necho pip $*")
    write_script(folder / "opt/manyhands/bin/manyhands", 'printf "%s\\n" "$@"')
    for place in ("/opt/manyhands", "/etc/systemd", "/root"):
        script = script.replace(place, f"{folder}{place}")
    return run(script, folder)


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script with the fakes of a folder in which a machine was set up."""
    environment = os.environ | {"PATH": f"{folder / 'fakes'}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", script], text=True, stdout=subprocess.PIPE, check=False, env=environment)


def write_script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def words_of(script: str, folder: Path, *, public: str = "exit 22") -> list[str]:
    """The arguments of ``manyhands`` on a machine with this script."""
    done = set_up(script, folder, public=public)
    assert done.returncode == 0, done.stdout
    return run(str(folder / "opt/manyhands/bin/take-part"), folder).stdout.splitlines()
