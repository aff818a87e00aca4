"""What fits under the keys of a run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from manyhands.averaging.messages import Position
from manyhands.averaging.peer_records import GOODBYE, PROGRESS_KIND, PeerRecord, peer_key
from manyhands.dht import Reason, Schema
from manyhands.optim.manifest import manifest_key
from manyhands.optim.metrics import HeldoutRecord, MetricsRecord, metrics_key
from manyhands.optim.run.run_records import declare_run
from tests.unit.dht.examples import open_record, owned_record

PROGRESS = PeerRecord(Position(3, b"here"), False, ["/ip4/10.0.0.1/tcp/1"], 30.0, samples=10, samples_per_second=2.5)


def schemas() -> dict[str, Schema]:
    declared: dict[str, Schema] = {}

    class Node:
        def declare(self, key: str, schema: Schema) -> None:
            declared[key] = schema

    node: Any = Node()
    declare_run(node, "run")
    return declared


def plain(value: msgspec.Struct) -> Any:
    return msgspec.to_builtins(value, builtin_types=(bytes,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (peer_key("run", PROGRESS_KIND), plain(PROGRESS)),
        (peer_key("run", PROGRESS_KIND), plain(PROGRESS) | {"mood": "from a later version"}),
        (peer_key("run", PROGRESS_KIND), GOODBYE),
        (peer_key("run", PROGRESS_KIND), None),
        (metrics_key("run"), plain(MetricsRecord(1, 2.0, 3, 4.0, 5))),
        (metrics_key("run", HeldoutRecord), plain(HeldoutRecord(1, 2.0, 0.25, 1.0, 5))),
        (manifest_key("run"), b"compressed"),
    ],
)
def test_records_that_peers_of_a_run_publish_fit_their_schemas_if_they_are_signed(key: str, value: Any) -> None:
    assert schemas()[key].fault_of(owned_record(value, key=key)) is None
    assert schemas()[key].fault_of(open_record(value, key=key)) is Reason.OTHER_SCHEMA


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (peer_key("run", PROGRESS_KIND), plain(PROGRESS) | {"samples": -1}),
        (peer_key("run", PROGRESS_KIND), "hello"),
        (peer_key("run", PROGRESS_KIND), {}),
        (metrics_key("run"), plain(MetricsRecord(1, 2.0, 3, 4.0, 5)) | {"loss": "low"}),
        (metrics_key("run", HeldoutRecord), plain(HeldoutRecord(1, 2.0, 0.25, 1.0, 5)) | {"sop_accuracy": 1.01}),
        (
            metrics_key("run", HeldoutRecord),
            plain(HeldoutRecord(1, 2.0, 0.25, 1.0, 5)) | {"mlm_accuracy": float("nan")},
        ),
        (metrics_key("run", HeldoutRecord), plain(HeldoutRecord(1, 2.0, 0.25, 1.0, 5)) | {"loss": float("inf")}),
        (metrics_key("run", HeldoutRecord), plain(HeldoutRecord(1, 2.0, 0.25, 1.0, 5)) | {"step": -1}),
        (manifest_key("run"), "text"),
    ],
)
def test_malformed_records_do_not_fit_the_schemas_of_a_run(key: str, value: Any) -> None:
    assert schemas()[key].fault_of(owned_record(value, key=key)) is Reason.OTHER_SCHEMA
