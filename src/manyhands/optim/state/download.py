"""Downloads the state of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from manyhands.averaging.messages import Position
from manyhands.averaging.roster import Roster, check_roster, lineage_of
from manyhands.averaging.state.content import State, StateHeader
from manyhands.averaging.state.download import Download
from manyhands.averaging.state.server import StateRequest
from manyhands.base.identity import PeerId
from manyhands.optim.manifest import RunManifest
from manyhands.optim.state.state import checked_scalars
from manyhands.rpc import Endpoint


async def download_state(
    endpoint: Endpoint,
    manifest: RunManifest,
    donors: Sequence[PeerId],
    wanted: Position,
    *,
    is_late: bool = False,
    is_onlooker: bool = False,
    held: State | None = None,
    num_tensors: int | None = None,
    on_violation: Callable[[PeerId, str], None] = lambda donor, what: None,
    on_header: Callable[[PeerId, StateHeader], None] = lambda donor, header: None,
) -> State:
    """Download the state of a run, which must fit its manifest.

    The arguments are those of :class:`manyhands.averaging.state.server.StateRequest` and
    :class:`manyhands.averaging.state.download.Download`.

    Raises:
        Unavailable: no donor could send it, or all that hold the chosen one failed; names each with its reason.
    """
    return await Download(
        endpoint, StateRequest(manifest.run_id, is_late, is_onlooker), donors, wanted, check_of(manifest),
        least_bytes=sum(4 * math.prod(spec.shape) for spec in manifest.tensors),  # more with statistics
        held=held, num_tensors=num_tensors, on_violation=on_violation, on_header=on_header,
    ).run()  # fmt: skip


def check_of(manifest: RunManifest) -> Callable[[StateHeader], None]:
    """A check whether a state fits a run, which raises ValueError if not."""

    def check(header: StateHeader) -> None:
        _check_place(header)
        checked_scalars(header, manifest.tensors, len(manifest.hyper_parameters), manifest.extra_tensors)

    return check


def _check_place(header: StateHeader) -> None:
    """Check that the roster is that of the position; raises ``ValueError`` if not."""
    check_roster(header.roster)
    if header.position.step == 0:
        if header.roster != Roster() or header.seal:
            raise ValueError("it has a roster before the first step")
    elif lineage_of(header.seal, header.roster) != header.position.lineage:
        raise ValueError("its roster is not that of its lineage")
