"""What would be started in AWS; nothing here calls AWS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from manyhands.cli.aws_command import TEMPLATE, TYPES

MAX_TEMPLATE_BYTES = 51_200


def template() -> Any:
    from cfnlint.decode import cfn_yaml

    return cfn_yaml.load(str(TEMPLATE))


@pytest.mark.long
def test_the_template_has_no_mistake_that_can_be_found_without_aws() -> None:
    """Errors and warnings of cfn-lint, which knows the schemas of AWS."""
    import cfnlint.api  # takes a second, which each worker of `make test` would spend

    text = TEMPLATE.read_text()
    assert text.count(TYPES) == 1
    assert len(text.encode()) < MAX_TEMPLATE_BYTES
    assert cfnlint.api.lint(text, config=cfnlint.api.ManualArgs(regions=["us-east-1"])) == []


def test_words_that_may_hold_a_token_are_not_shown_by_aws() -> None:
    parameters = template()["Parameters"]
    assert parameters["Package"]["NoEcho"]
    assert parameters["TrainOptions"]["NoEcho"]


def test_spot_workers_are_replaced_by_aws_and_only_peers_can_be_reached() -> None:
    resources = template()["Resources"]
    workers = resources["WorkerGroup"]["Properties"]
    assert workers["CapacityRebalance"]
    assert workers["MixedInstancesPolicy"]["InstancesDistribution"] == {
        "OnDemandBaseCapacity": 0,
        "OnDemandPercentageAboveBaseCapacity": 0,
        "SpotAllocationStrategy": "price-capacity-optimized",
    }
    (rule,) = resources["SecurityGroup"]["Properties"]["SecurityGroupIngress"]
    assert (rule["FromPort"], rule["ToPort"]) == ({"Ref": "Port"}, {"Ref": "Port"})
    machines = [resources["Coordinator"]["Properties"]]
    machines += [
        resources[name]["Properties"]["LaunchTemplateData"] for name in ("AuxiliaryTemplate", "WorkerTemplate")
    ]
    for one in machines:
        assert one["MetadataOptions"]["HttpTokens"] == "required"
        assert one["BlockDeviceMappings"][0]["Ebs"]["DeleteOnTermination"]
        assert "IamInstanceProfile" not in one, "the machines need no rights in the account"


def test_images_are_the_newest_unless_they_are_named() -> None:
    resources = template()["Resources"]
    _, ubuntu, named = resources["Coordinator"]["Properties"]["ImageId"]["Fn::If"]
    assert ubuntu.startswith("{{resolve:ssm:/aws/service/canonical/ubuntu/server/24.04/")
    assert named == {"Ref": "CpuImage"}
    _, with_driver, named = resources["WorkerTemplate"]["Properties"]["LaunchTemplateData"]["ImageId"]["Fn::If"]
    assert with_driver.startswith("{{resolve:ssm:/aws/service/deeplearning/ami/x86_64/")
    assert named == {"Ref": "WorkerImage"}


def test_the_extras_of_a_worker_have_all_packages_that_the_options_of_train_import() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def packages_of(names: str) -> set[str]:
        found = set()
        for requirement in (one for name in names.split(",") for one in extras[name]):
            own = requirement.partition("manyhands[")[2].rstrip("]")
            found |= packages_of(own) if own else {re.split("[><=; ]", requirement)[0].lower()}
        return found

    (wanted,) = set(re.findall(r"PACKAGE=manyhands\[(.*)]", TEMPLATE.read_text()))
    imported = {"torch", "transformers", "aiohttp", "fsspec", "s3fs", "tensorboardx"}
    imported |= {"starlette", "uvicorn", "prometheus_client"}
    assert imported <= packages_of(wanted)
