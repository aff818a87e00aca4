"""In which order relays are asked."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from manyhands.base.errors import Unavailable
from manyhands.base.identity import PeerId
from manyhands.rpc.config import RpcConfig
from manyhands.rpc.dialling import Dialler, Opened
from manyhands.rpc.frames import CONTROL, Hello
from manyhands.rpc.relayed_streams import RelayedStreams
from manyhands.runtime.tasks import TaskOwner

NAMED, STRANGER, FAILED, TARGET = (PeerId(name) for name in ("named", "stranger", "failed", "target"))


def asking() -> tuple[RelayedStreams, list[PeerId]]:
    """A caller of which no relay can be reached, and the relays that it has asked."""
    asked: list[PeerId] = []

    async def refuse(relay: PeerId, _hello: Hello, _timeout_s: float) -> Opened:
        asked.append(relay)
        raise Unavailable("not there")

    unused = cast("Any", None)
    dialler = Dialler(unused, unused, unused)
    streams = RelayedStreams(
        unused,
        dialler,
        unused,
        TaskOwner("relays"),
        Counter(),
        RpcConfig(),
        refuse,
        unused,
        unused,
        unused,
        lambda relay: relay == NAMED,
    )
    return streams, asked


@pytest.mark.parametrize(("has_failed", "order"), [(False, [STRANGER, NAMED]), (True, [NAMED, STRANGER])])
async def test_relays_that_the_user_named_come_first_once_one_has_failed(has_failed: bool, order: list[PeerId]) -> None:
    """Also if that one is not among those that are asked, as when its connections move to another relay."""
    streams, asked = asking()
    if has_failed:
        streams.failed(FAILED)
    with pytest.raises(Unavailable, match="relay stranger: not there"):
        await streams.open([STRANGER, NAMED], TARGET, Hello(CONTROL), 1.0)
    assert asked == order


async def test_relays_that_failed_come_last_in_the_order_in_which_they_failed() -> None:
    streams, asked = asking()
    streams.failed(NAMED)
    streams.failed(FAILED)
    with pytest.raises(Unavailable):
        await streams.open([FAILED, NAMED, STRANGER], TARGET, Hello(CONTROL), 1.0)
    assert asked == [STRANGER, NAMED, FAILED]
