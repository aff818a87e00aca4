"""One region of an AWS account: what it has, what it costs, and its errors in our words.

Credentials come from boto3's own chain (environment, ~/.aws, single sign-on, the role of a machine). They are neither
read nor stored here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, NamedTuple

from manyhands.base.errors import ConfigError, ManyhandsError, MissingExtra, Unavailable
from manyhands.base.text import reason_of
from manyhands.cloud.plan import NoAccount

try:
    import boto3
    from botocore import exceptions as aws_errors
    from botocore.config import Config
except ModuleNotFoundError as error:
    if str(error.name).split(".")[0] not in ("boto3", "botocore"):
        raise
    raise MissingExtra("manyhands aws", "aws") from error

ClientError = aws_errors.ClientError
"""A refusal by AWS, with a code."""

CLIENT_CONFIG = Config(
    retries={"mode": "standard", "max_attempts": 8}, connect_timeout=10, read_timeout=60, user_agent_extra="manyhands"
)
"""botocore itself waits and tries again when AWS throttles, up to about a minute in all."""

PRICE_CONFIG = Config(retries={"mode": "standard", "max_attempts": 2}, connect_timeout=5, read_timeout=10)
"""A price is worth no long wait."""

PRICING_REGION = "us-east-1"
"""Prices of all regions are served here."""

THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"})
BAD_CREDENTIALS = frozenset(
    {"AuthFailure", "UnrecognizedClientException", "InvalidClientTokenId", "ExpiredToken", "ExpiredTokenException",
     "RequestExpired", "SignatureDoesNotMatch", "InvalidAccessKeyId", "IncompleteSignature"}
)  # fmt: skip
NOT_ALLOWED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
QUOTA = frozenset({"MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "InstanceLimitExceeded", "VolumeLimitExceeded"})
NO_CAPACITY = frozenset(
    {"InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacity", "SpotMaxPriceTooLow",
     "UnfulfillableCapacity", "Unsupported", "InsufficientFreeAddressesInSubnet"}
)  # fmt: skip
"""Another zone, or another type, may be there."""


def code_of(error: Any) -> str:
    """The code of a ``ClientError``."""
    return str(error.response.get("Error", {}).get("Code", ""))


@contextmanager
def own_words(doing: str) -> Iterator[None]:
    """Turn the errors of boto3 within the block into errors of one line.

    Raises:
        NoAccount: there are no credentials, or no region is configured.
        ConfigError: credentials, permissions, quotas or values are wrong.
        Unavailable: AWS does not answer, or throttles for long.
    """
    try:
        yield
    except ClientError as error:
        raise _refusal(error, doing) from None
    except aws_errors.NoRegionError:
        raise NoAccount(
            "no AWS region is configured; name one: --region us-east-1, or set AWS_DEFAULT_REGION"
        ) from None
    except (
        aws_errors.NoCredentialsError,
        aws_errors.PartialCredentialsError,
        aws_errors.CredentialRetrievalError,
        aws_errors.SSOError,
        aws_errors.TokenRetrievalError,
    ) as error:
        raise NoAccount(
            f"no AWS credentials to use ({reason_of(error)}); 'aws configure' or 'aws sso login' stores some, "
            "AWS_PROFILE chooses among them"
        ) from None
    except (aws_errors.HTTPClientError, aws_errors.ConnectionError) as error:
        raise Unavailable(f"AWS does not answer while {doing}: {reason_of(error)}") from None
    except aws_errors.BotoCoreError as error:
        raise ConfigError(f"{doing} failed: {reason_of(error)}") from None


def _refusal(error: Any, doing: str) -> ManyhandsError:
    code, message = code_of(error), " ".join(str(error.response.get("Error", {}).get("Message", "")).split())
    if code in BAD_CREDENTIALS:  # its message may name keys
        return ConfigError(
            f"AWS refuses the credentials ({code}); new ones: 'aws configure' or 'aws sso login'. Is the clock right?"
        )
    if code in NOT_ALLOWED:
        call = str(error.operation_name)
        return ConfigError(f"these credentials do not permit {call}, needed for {doing}; add it to their IAM policy")
    if code in THROTTLED:
        return Unavailable(f"AWS throttles this account ({code}) while {doing}; try again in a minute")
    if code in QUOTA:
        return ConfigError(
            f"a quota of the account is reached while {doing} ({code}: {message[:200]}); ask for more under "
            "'Service Quotas' of EC2, or start fewer machines"
        )
    if code in NO_CAPACITY:
        return ConfigError(f"AWS has no such machine free while {doing} ({code}: {message[:200]})")
    return ConfigError(f"AWS refuses {doing} ({code}: {message[:200]})")


class Subnet(NamedTuple):
    """A subnet of the default network; each zone has one."""

    subnet_id: str
    zone: str


class Image(NamedTuple):
    """An image of a machine, with its root disk."""

    image_id: str
    root_device: str
    size_gb: int


class Account:
    """The clients of one region.

    Args:
        session: a boto3 session; by default a new one.
    Attributes:
        region: its name.
        ec2: the client of EC2.
    Raises:
        ConfigError: no region is configured, or the profile does not exist.
    """

    def __init__(self, region: str | None = None, session: Any = None) -> None:
        with own_words("reading the configuration of AWS"):
            self._session = session if session is not None else boto3.Session(region_name=region)
            self.ec2 = self._client("ec2", region)
        self.region = str(self.ec2.meta.region_name)
        partitions = self._session.get_available_partitions()
        known = [one for name in partitions for one in self._session.get_available_regions("ec2", partition_name=name)]
        if self.region not in known:
            raise ConfigError(f"AWS has no region {self.region!r}; for example: --region us-east-1")

    def _client(self, service: str, region: str | None, config: Config = CLIENT_CONFIG) -> Any:
        return self._session.client(service, region_name=region, config=config)

    def default_network(self) -> tuple[str, list[Subnet]]:
        """The id of the default VPC, and its subnets, by zone.

        Raises:
            ConfigError: the region has none.
        """
        with own_words("looking for the default VPC"):
            vpcs = self.ec2.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
            if not vpcs:
                raise ConfigError(
                    f"region {self.region} has no default VPC; 'aws ec2 create-default-vpc' makes one, or choose "
                    "another region with --region"
                )
            vpc_id = str(vpcs[0]["VpcId"])
            filters = [{"Name": "vpc-id", "Values": [vpc_id]}, {"Name": "default-for-az", "Values": ["true"]}]
            subnets = self.ec2.describe_subnets(Filters=filters)["Subnets"]
        return vpc_id, sorted((Subnet(one["SubnetId"], one["AvailabilityZone"]) for one in subnets), key=lambda s: s[1])

    def zones_of(self, types: Sequence[str]) -> dict[str, set[str]]:
        """The zones that have each type of machine; none for types that this region lacks."""
        zones: dict[str, set[str]] = {one: set() for one in types}
        with own_words("looking for types of machines"):
            pages = self.ec2.get_paginator("describe_instance_type_offerings").paginate(
                LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": list(zones)}]
            )
            for page in pages:
                for offering in page["InstanceTypeOfferings"]:
                    zones[offering["InstanceType"]].add(offering["Location"])
        return zones

    def image(self, image_id: str | None, parameter: str) -> Image:
        """The image with this id, or the newest one that the SSM parameter names.

        Raises:
            ConfigError: there is no such image here, or it is not for x86-64 and Linux.
        """
        if image_id is None:
            with own_words(f"looking up the newest image ({parameter}; --image and --cpu-image name others)"):
                image_id = str(self._client("ssm", self.region).get_parameter(Name=parameter)["Parameter"]["Value"])
        with own_words(f"looking up image {image_id}"):
            images = self.ec2.describe_images(ImageIds=[image_id])["Images"]
        if not images:
            raise ConfigError(f"there is no image {image_id} in region {self.region}")
        found = images[0]
        if found.get("Platform") == "windows" or found.get("Architecture") != "x86_64":
            raise ConfigError(f"image {image_id} ({found.get('Name')}) is not for Linux on x86-64; name one of Ubuntu")
        root = str(found.get("RootDeviceName", "/dev/sda1"))
        disks = {disk.get("DeviceName"): disk.get("Ebs", {}) for disk in found.get("BlockDeviceMappings", [])}
        return Image(image_id, root, int(disks.get(root, {}).get("VolumeSize", 8)))

    def spot_prices(self, types: Sequence[str]) -> dict[tuple[str, str], float]:
        """The newest spot price in US dollars per hour, by type and zone; empty if it cannot be found."""
        prices: dict[tuple[str, str], tuple[Any, float]] = {}
        try:
            pages = self.ec2.get_paginator("describe_spot_price_history").paginate(
                InstanceTypes=list(types), ProductDescriptions=["Linux/UNIX"], StartTime=datetime.now(timezone.utc)
            )
            for page in pages:
                for entry in page["SpotPriceHistory"]:
                    where, at = (entry["InstanceType"], entry["AvailabilityZone"]), entry["Timestamp"]
                    if where not in prices or prices[where][0] < at:
                        prices[where] = (at, float(entry["SpotPrice"]))
        except (ClientError, aws_errors.BotoCoreError):  # a price is worth no failure
            return {}
        return {where: price for where, (_, price) in prices.items()}

    def on_demand_price(self, machine_type: str) -> float | None:
        """The price of a type on demand, in US dollars per hour; None if it cannot be found."""
        wanted = {
            "instanceType": machine_type, "regionCode": self.region, "operatingSystem": "Linux", "tenancy": "Shared",
            "preInstalledSw": "NA", "capacitystatus": "Used",
        }  # fmt: skip
        filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
        try:
            found = self._client("pricing", PRICING_REGION, PRICE_CONFIG).get_products(
                ServiceCode="AmazonEC2", Filters=filters, MaxResults=1
            )
            return _dollars(json.loads(found["PriceList"][0]))
        except (ClientError, aws_errors.BotoCoreError, LookupError, ValueError):
            return None


def _dollars(product: Mapping[str, Any]) -> float:
    """The hourly price in one product of AWS's price list."""
    (term,) = product["terms"]["OnDemand"].values()
    (dimension,) = term["priceDimensions"].values()
    return float(dimension["pricePerUnit"]["USD"])
