"""What would be started in AWS; nothing here calls AWS."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cfnlint.api
import pytest
from cfnlint.decode import cfn_yaml

from manyhands.base.errors import ConfigError
from manyhands.cli.options import DEFAULT_RUN_ID
from manyhands.cloud.experiment import TEMPLATE, TRAIN_EXTRAS, TYPES, Experiment
from manyhands.version import __version__

MAX_TEMPLATE_BYTES = 51_200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "*"}, "'*' cannot name an experiment"),
        ({"name": ""}, "cannot name an experiment"),
        ({"name": "a\n"}, "cannot name an experiment"),
        ({"name": "my_albert"}, "use 1 to 64 letters, digits and -, for example my-albert"),
        ({"name": "x" * 65}, "1 to 64 letters"),
        ({"workers": 0}, "--workers is 0; it must be from 1 to 200"),
        ({"workers": 10**6}, "--workers is 1000000"),
        ({"auxiliary": -1}, "--auxiliary is -1; it must be from 0"),
        ({"client_mode": True}, "add --auxiliary 1, or leave out --client-mode"),
        ({"port": 22}, "--port is 22; it must be from 1024"),
        ({"bandwidth_mbit_s": 0}, "--bandwidth-mbit-s is 0"),
        ({"bandwidth_mbit_s": float("nan")}, "--bandwidth-mbit-s is nan"),
    ],
)
def test_wrong_values_are_refused_with_a_value_that_works(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        Experiment(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_template_has_no_mistake_that_can_be_found_without_aws() -> None:
    """Errors and warnings of cfn-lint, which knows the schemas of AWS."""
    assert TEMPLATE.read_text().count(TYPES) == 1
    text = Experiment(worker_types=("g5.xlarge", "g6.xlarge", "g5.xlarge")).template
    assert '[{"InstanceType": "g5.xlarge"}, {"InstanceType": "g6.xlarge"}]' in text
    assert len(text.encode()) < MAX_TEMPLATE_BYTES
    assert cfnlint.api.lint(text, config=cfnlint.api.ManualArgs(regions=["us-east-1"])) == []


def test_the_parameters_are_those_of_the_template() -> None:
    template = cfn_yaml.load(str(TEMPLATE))
    of_the_account = {"Vpc", "Subnets", "CpuImage", "CpuDiskGb", "WorkerImage", "WorkerDiskGb"}
    parameters = Experiment().parameters([])
    assert set(template["Parameters"]) == of_the_account | parameters.keys()
    assert parameters["Name"] == DEFAULT_RUN_ID
    for name in ("MonitorPackage", "TrainPackage", "TrainOptions"):
        assert template["Parameters"][name]["NoEcho"], "an address may hold a token"


def test_spot_workers_are_replaced_by_aws_and_only_peers_can_be_reached() -> None:
    resources = cfn_yaml.load(str(TEMPLATE))["Resources"]
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

    imported = {"torch", "transformers", "aiohttp", "fsspec", "s3fs", "tensorboardx"}
    imported |= {"starlette", "uvicorn", "prometheus_client"}
    assert imported <= packages_of(TRAIN_EXTRAS)
    parameters = Experiment().parameters([])
    assert parameters["TrainPackage"] == f"'manyhands[{TRAIN_EXTRAS}]=={__version__}'"
    assert parameters["MonitorPackage"] == f"manyhands=={__version__}"
