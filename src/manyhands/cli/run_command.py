"""``manyhands run create``: make the key and the charter of a run; ``run revoke-invitation`` is listed here too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from manyhands.access import Charter, Limits, SignedCharter
from manyhands.access.charter import MAX_COORDINATORS, Access
from manyhands.base.errors import ConfigError, RunNotFound
from manyhands.base.identity import Identity, PeerId, public_key_of
from manyhands.base.run_id import checked_run_id
from manyhands.base.text import shell_option
from manyhands.cli.access_commands import revoke_invitation
from manyhands.cli.run_look_up import Scout

run_key = App(name="run", help="Make the key of a run, and take invitations back: its owner decides who takes part.")
run_key.command(revoke_invitation)


@run_key.command
def create(
    *,
    run_id: Annotated[str, Parameter(help="Name of the run: 1 to 64 characters, without '.'.")],
    access: Annotated[Access, Parameter(help="open: everybody may take part; invite: peers with an invitation.")] = (
        "invite"
    ),
    coordinator: Annotated[
        tuple[str, ...],
        Parameter(
            help="Peer ids of the first peers or monitors that may invite and ban for you. They print their ids."
        ),
    ] = (),
    key: Annotated[
        Path | None, Parameter(help="File of an owner key that is there; by default RUN_ID.key, made if missing.")
    ] = None,
    charter: Annotated[Path | None, Parameter(help="File to write; by default RUN_ID.charter.")] = None,
    manifest_of: Annotated[
        str | None,
        Parameter(
            help="Address of a trainer of this run id: only its model and settings fit the run. By default, the peer "
            "that begins the run decides them."
        ),
    ] = None,
    max_weight_ratio: Annotated[
        float,
        Parameter(help="Largest weight of a member in a round, as a multiple of the median; later it may earn more."),
    ] = Limits().max_weight_ratio,
    max_weight_share: Annotated[
        float, Parameter(help="Largest weight of a member, as a share of its group's, in groups of 5 and more.")
    ] = Limits().max_weight_share,
) -> None:
    """Make a run key, and sign the charter of the run with it.

    The key is yours alone: keep a copy where nobody else can read it. A lost key
    cannot be made again, and a stranger who has it owns the run. The charter is
    not secret; give it to the coordinators. For example:

        manyhands first-peer --state-dir first-peer     prints its peer id
        manyhands run create --run-id my-albert --coordinator 12D3KooW...
        manyhands first-peer --state-dir first-peer --charter my-albert.charter
        manyhands invite --state-dir first-peer --uses 5 --expires 7d
    """
    checked_run_id(run_id)
    if len(coordinator) > MAX_COORDINATORS:
        raise ConfigError(f"{len(coordinator)} coordinators are named; name at most {MAX_COORDINATORS}")
    for peer_id in coordinator:
        public_key_of(PeerId(peer_id))
    limits = Limits(max_weight_ratio, max_weight_share)
    key_path = key or Path(f"{run_id}.key")
    path = charter or Path(f"{run_id}.charter")
    if key is not None and not key.exists():
        raise ConfigError(
            f"key {key} does not exist, and a run with a new key has another owner; name the file of the owner key, or "
            f"leave --key out to have {run_id}.key made"
        )
    if path.exists():
        raise ConfigError(f"charter {path} exists, and is not overwritten; name another file: --charter FILE")
    manifest = _fingerprint_at(manifest_of, run_id) if manifest_of is not None else b""
    is_new = not key_path.exists()
    owner = Identity.load_or_create(key_path)
    created_at = float(int(time.time()))
    decided = Charter(run_id, owner.peer_id, access, list(coordinator), manifest, limits, created_at)
    SignedCharter.sign(owner, decided).save(path)
    where = f"--charter {path}" + ("" if coordinator else f" --identity {key_path}")
    print(f"Owner key: {key_path} ({'made just now; keep a copy in a safe place' if is_new else 'it was there'})")  # noqa: T201
    print(f"Charter:   {path}, of run {run_id} with access {access}")  # noqa: T201
    if manifest:
        print(f"Settings:  those of the trainer at {manifest_of}, with fingerprint {manifest.hex()}")  # noqa: T201
    print("Next, on the machine of each coordinator, with its own state dir:")  # noqa: T201
    print(f"\n    manyhands first-peer {where} --state-dir first-peer --listen 31337\n", flush=True)  # noqa: T201


def _fingerprint_at(address: str, run_id: str) -> bytes:
    """The fingerprint of the run manifest that the trainer at an address has signed.

    Raises:
        ConfigError: the peer there does not train in the run.
    """
    start_one = f"start a trainer with your settings first: manyhands train {shell_option('--run-id', run_id)}"
    with Scout([address]) as scout:
        try:
            run = scout.choose(run_id, is_trained=True)
        except RunNotFound as error:
            raise RunNotFound(f"{error}; {start_one}") from error
        if run.manifest is None or not scout.is_signed_by_named(run):
            raise ConfigError(f"the peer at {address} does not train in run {run_id!r}; {start_one}")
        return run.manifest.fingerprint()
