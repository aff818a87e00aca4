"""What the attacker's machine does, one program for each attack; it goes on until it is killed.

    python -m tests.hostile.attacks NAME HOST INITIAL_PEER

It prints ``identity PEER_ID`` for each identity that signs something, then ``attacking``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import torch

import manyhands.peer as peer_module
from manyhands.access import Charter, Lease, SignedCharter
from manyhands.access.charters import read_charters
from manyhands.access.lease import SignedLease
from manyhands.access.messages import LEASE_RECORD_TTL_S, CharterRecord, charter_key, leases_key
from manyhands.averaging.allreduce.bandwidth import RoundBandwidth
from manyhands.averaging.allreduce.butterfly import Butterfly
from manyhands.averaging.messages import (
    CALL,
    JOIN,
    CallRequest,
    JoinRequest,
    JoinResponse,
    Member,
    Position,
)
from manyhands.averaging.peer_records import PROGRESS_KIND, PeerRecord, peer_key
from manyhands.averaging.roster import Roster, lineage_of
from manyhands.averaging.run_endpoint import RunEndpoint
from manyhands.averaging.state.content import State, StateHeader, sealed, state_of
from manyhands.averaging.state.server import (
    CHUNK,
    DIGESTS,
    FRAME,
    INDEX,
    STREAM_KIND,
    StateAnswer,
    StateRequest,
    StateServer,
)
from manyhands.base.address import Address
from manyhands.base.errors import ManyhandsError
from manyhands.base.identity import Identity
from manyhands.dht.config import MAX_FOUND_BYTES, MAX_FOUND_RECORDS, MAX_STORED_RECORDS, DhtConfig
from manyhands.dht.issuing import Issuer
from manyhands.dht.messages import FIND, STORE, FindRequest, FindResponse, StoreOutcome, StoreRequest
from manyhands.dht.records import AgedRecord, Record
from manyhands.optim.accumulator import Contribution
from manyhands.optim.manifest import RunManifest, manifest_key, read_manifest
from manyhands.optim.metrics import AccountRecord, metrics_key
from manyhands.optim.optimizer import Optimizer
from manyhands.optim.run.progress import MAX_COUNT
from manyhands.optim.run.run_records import declare_run
from manyhands.optim.run.step_rounds import StepRounds
from manyhands.optim.state.state import Scalars
from manyhands.optim.step.replica import Replica
from manyhands.peer import Peer, Presence
from manyhands.rpc import RpcConfig
from manyhands.rpc.punched_streams import PUNCH, PunchRequest
from manyhands.rpc.relayed_streams import RELAYED
from manyhands.testing.lies import lie_about_means
from manyhands.transport import Stream, TlsTransport, Transport
from tests.dht_requests import store_at
from tests.hostile import networks
from tests.hostile.relays import Spoil, Spoiling, delays, drops, floods, reorders
from tests.hostile.trainer import BATCH_S, RUN_ID, TARGET, adam, joined, loss_of, new_model
from tests.intercepted import InterceptedEndpoint
from tests.phases import change_butterflies
from tests.smaller import make_smaller

TTL_S = 10.0
CALL_S = 5.0
FOREIGN = 12
"""First number of addresses that no machine here can reach."""
NUM_NETWORKS = 4
"""More than the honest trainers have."""
FURTHER_HOSTS = [f"{networks.NETWORK}.{100 + number}.1.2" for number in range(NUM_NETWORKS)]
"""Further addresses of the attacker's machine."""
NUM_MEMBERS = 4
"""The first machines: the honest trainers and the monitor."""
SSH_PORT = 22
RELAYS = {
    "relays that drop": drops,
    "relays that delay": delays,
    "relays that reorder": reorders,
    "relays that flood": floods,
}
NUM_RELAYS = 6
"""With one honest volunteer, so that most of those that are asked are hostile."""
HANDSHAKE_BYTES = 16_000
"""More than the handshake of a stream and its hello."""
LOCAL_PLACES = [("10.0.0.7", 31000), ("169.254.169.254", 31000)]
"""In the networks of others, the second one where clouds serve their secrets."""
THIRD_PARTY = ("11.99.1.2", 31000)
ADDRESSES = "addresses of others"
PUNCHES = "punches to places of others"
FALSE_MANIFESTS = "5 false manifests"
FALSE_LEASES = "6,000 false leases"
FOREIGN_CHARTERS = "3,600 foreign charters"
STRANGERS_RECORDS = "6,000 records of strangers"
TWO_MACHINES = "6,200 records of strangers on each of two machines"
FORGED_LEASES = "6,000 leases with forged records"
BY_INVITATION = (FALSE_LEASES, FOREIGN_CHARTERS, STRANGERS_RECORDS, TWO_MACHINES, FORGED_LEASES)
"""Attacks on a run that the attacker has no ticket of."""
FILL_S = 40.0
SLOW_BYTES = 1200
"""Of a state that a slow donor sends, ten times a second."""

SEAL = b"\xff" * 32
LINEAGE = lineage_of(SEAL, Roster())
"""Of the attackers' states: it fits their roster, so it is their content that is looked at."""

Attack = Callable[["Attacker"], None]
SpoilState = Callable[[Scalars, StateHeader, list[torch.Tensor | None]], None]


class Attacker:
    """One machine, with as many identities as it likes."""

    def __init__(self, host: str, initial_peer: str) -> None:
        setattr(peer_module, "Endpoint", InterceptedEndpoint)  # noqa: B010 (its requests are answered otherwise)
        self.host = host
        self.initial_peer = initial_peer
        self.peer = Peer(initial_peers=[initial_peer], listen=[f"/ip4/{host}/tcp/0"])
        self.charter: SignedCharter | None = None
        self.own_manifest: RunManifest | None = None
        print("identity", self.peer.peer_id, flush=True)

    def begin(self) -> None:
        print("attacking", flush=True)

    def forever(self, period_s: float, act: Callable[[Presence], Awaitable[None]], *presences: Presence) -> None:
        """Act again and again with each identity; what fails is tried again."""

        async def go_on(presence: Presence) -> None:
            while True:
                with contextlib.suppress(ManyhandsError):
                    await act(presence)
                await asyncio.sleep(period_s)

        async def all_go_on() -> None:
            await asyncio.gather(*map(go_on, presences or [self.peer.presence]))

        self.begin()
        self.peer.run(all_go_on(), 1e6, "attacking")

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        return self.peer.run(coro, 60.0, "preparing")

    def more(
        self,
        num: int,
        hosts: Sequence[str] = (),
        config: RpcConfig | None = None,
        transport_of: Callable[[Identity], Transport] = TlsTransport,
    ) -> list[Presence]:
        """Further identities at the same address, or each at one of these, which must be of this machine."""

        async def start(host: str) -> Presence:
            presence = Presence(transport_of(Identity.generate()), rpc_config=config)
            await presence.start([Address.parse(self.initial_peer)], [Address.parse(f"/ip4/{host}/tcp/0")])
            print("identity", presence.peer_id, flush=True)
            return presence

        return [self.run(start(host)) for host in hosts or [self.host] * num]

    def manifest(self) -> RunManifest:
        signed = self.run(read_manifest(self.peer.dht, RUN_ID))
        assert signed is not None
        return signed.manifest

    async def honest(self, presence: Presence) -> dict[str, PeerRecord]:
        """The records of the run, by peer id."""
        records = {}
        for subkey, stored in (await presence.dht.get(peer_key(RUN_ID, PROGRESS_KIND))).items():
            with contextlib.suppress(msgspec.ValidationError):
                records[subkey] = msgspec.convert(stored.value, PeerRecord)
        return records

    async def leader(self, presence: Presence) -> tuple[str, PeerRecord] | None:
        """Who is furthest, of the trainers."""
        records = await self.honest(presence)
        return max(records.items(), key=lambda item: item[1].position.step) if records else None

    def record(self, presence: Presence, **fields: Any) -> PeerRecord:
        """A progress record; what is not given is as an ordinary trainer has it."""
        return PeerRecord(
            **{
                "position": Position(0, bytes(32)), "samples": 16, "samples_per_second": 300.0, "lineage_samples": 0,
                "is_client": False, "addresses": [str(a) for a in presence.endpoint.addresses], "ttl_s": TTL_S,
                "batch_s": BATCH_S, **fields,
            }
        )  # fmt: skip

    async def publish(self, presence: Presence, **fields: Any) -> None:
        """Publish such a record of an identity."""
        value = msgspec.to_builtins(self.record(presence, **fields), builtin_types=(bytes,))
        await presence.dht.store(peer_key(RUN_ID, PROGRESS_KIND), value, TTL_S, subkey=presence.peer_id)


def state_at(position: Position, samples: int, spoil: SpoilState) -> State:
    """A state of the run's model after some steps of its own, and what is wrong with it; its digest is right."""
    model = new_model()
    replica = Replica(adam(model), None)
    loss_of(model, torch.Generator()).backward()
    replica.optimizer.step()
    state = replica.capture()
    scalars = msgspec.msgpack.decode(state.header.scalars, type=Scalars)
    header = state.header
    tensors: list[torch.Tensor | None] = [tensor.clone() for tensor in state.tensors]
    spoil(scalars, header, tensors)
    sent = [(spec, tensor) for spec, tensor in zip(header.tensors, tensors, strict=True) if tensor is not None]
    specs = [msgspec.structs.replace(spec, shape=tuple(tensor.shape)) for spec, tensor in sent]
    encoded = msgspec.msgpack.encode(scalars, order="sorted")
    header = StateHeader(position, samples, specs, encoded, b"", seal=SEAL)
    return sealed(state_of(header, [tensor for _, tensor in sent]))


def serve(presence: Presence, capture: Callable[[], State]) -> None:
    StateServer(presence.endpoint, RUN_ID, capture, lambda: capture().header.position)


def serve_slowly(presence: Presence, capture: Callable[[], State]) -> None:
    """Send the state at 12 KB/s."""

    async def trickle(remote: Any, header: bytes, stream: Stream) -> None:
        state = capture()
        answer = msgspec.msgpack.encode(StateAnswer(state.header))
        await stream.send(len(answer).to_bytes(4, "big") + answer)
        await stream.send(FRAME.pack(DIGESTS, len(state.digests)), *state.digests)
        await stream.receive_into(memoryview(bytearray(INDEX.size)))
        await stream.send(FRAME.pack(CHUNK, 0))
        content = bytes(state.chunk(0))
        for start in itertools.count(0, SLOW_BYTES):
            await stream.send(content[start : start + SLOW_BYTES] or b"\0")
            await asyncio.sleep(0.1)

    presence.endpoint.accept_bulk(STREAM_KIND, trickle)


def branch_with_a_state(
    ahead: int,
    spoil: SpoilState,
    hosts: Sequence[str] = (),
    serve: Callable[[Presence, Callable[[], State]], None] = serve,
    *,
    num_claimed: int = 1,
) -> Attack:
    """Records so many steps ahead of everybody, and a state behind them.

    Args:
        hosts: an identity listens at each of these, so that they are believed: what holds then is what is done with the
            state.
        num_claimed: so many identities on one machine, each of which claims to be in a network of its own.
    """

    def attack(attacker: Attacker) -> None:
        presences = attacker.more(num_claimed, hosts)
        own, current = {presence.peer_id for presence in presences}, [state_at(Position(1, LINEAGE), 1, spoil)]

        async def begin() -> None:
            for presence in presences:
                serve(presence, lambda: current[0])

        attacker.run(begin())

        async def act(presence: Presence) -> None:
            honest = {k: record for k, record in (await attacker.honest(presence)).items() if k not in own}
            if not honest:
                return
            record = max(honest.values(), key=lambda record: record.position.step)
            step = min(record.position.step + ahead, MAX_COUNT)
            position = Position(step, LINEAGE)
            samples = min(record.lineage_samples + ahead * TARGET, MAX_COUNT)
            header = msgspec.structs.replace(current[0].header, position=position, lineage_samples=samples)
            current[0] = dataclasses.replace(current[0], header=header)
            addresses = [str(address) for address in presence.endpoint.addresses]
            if num_claimed > 1:
                addresses.insert(0, f"/ip4/{FOREIGN}.{presences.index(presence)}.1.2/tcp/{networks.PORT}")
            await attacker.publish(presence, position=position, lineage_samples=samples, addresses=addresses)

        attacker.forever(0.2, act, *presences)

    return attack


def climb(scalars: Scalars, header: StateHeader, tensors: list[torch.Tensor | None]) -> None:
    for group in scalars.groups:
        group["maximize"] = True


def not_numbers(scalars: Scalars, header: StateHeader, tensors: list[torch.Tensor | None]) -> None:
    for tensor in tensors[: len(tensors) // 2]:
        if tensor is not None:
            tensor.fill_(float("nan"))


def learning_rate_of_nan(scalars: Scalars, header: StateHeader, tensors: list[torch.Tensor | None]) -> None:
    for group in scalars.groups:
        group["lr"] = float("nan")


def statistics(instead: torch.Tensor | None) -> SpoilState:
    """Others than they should be, or none."""

    def spoil(scalars: Scalars, header: StateHeader, tensors: list[torch.Tensor | None]) -> None:
        for index, spec in enumerate(header.tensors):
            if spec.name.endswith("exp_avg"):
                tensors[index] = instead

    return spoil


def nothing(scalars: Scalars, header: StateHeader, tensors: list[torch.Tensor | None]) -> None:
    pass


def as_a_member(change: Callable[[torch.Tensor, float], tuple[torch.Tensor, float]]) -> Attack:
    """It trains like the others, but brings something else to each round."""

    def attack(attacker: Attacker) -> None:
        model = new_model()
        optimizer = joined(attacker.peer, model)
        average = StepRounds.average
        is_attacking = threading.Event()

        async def averaged(step_rounds: StepRounds, contribution: Contribution) -> Any:
            if is_attacking.is_set():
                mean_N, weight = change(contribution.mean_N.clone(), contribution.weight)
                contribution = dataclasses.replace(contribution, mean_N=mean_N, weight=weight, refill=None)
            return await average(step_rounds, contribution)

        StepRounds.average = averaged  # type: ignore[method-assign,assignment]
        train_and_attack(attacker, model, optimizer, is_attacking)

    return attack


def as_a_reducer(change: Callable[[torch.Tensor], torch.Tensor]) -> Attack:
    """It trains like the others, but sends other means of its span than it has computed."""

    def attack(attacker: Attacker) -> None:
        model = new_model()
        optimizer = joined(attacker.peer, model)
        is_attacking = threading.Event()

        def lie(butterfly: Butterfly) -> None:
            if is_attacking.is_set():
                lie_about_means(butterfly, change)

        setattr(RoundBandwidth, "lose_round", lambda _: None)  # noqa: B010 (it reduces although it is blamed)
        change_butterflies(attacker.peer.peer_id, lie)
        train_and_attack(attacker, model, optimizer, is_attacking)

    return attack


def train_and_attack(
    attacker: Attacker, model: torch.nn.Module, optimizer: Optimizer, is_attacking: threading.Event
) -> None:
    """Train, and begin to attack after two rounds."""
    generator = torch.Generator().manual_seed(99)
    while True:
        time.sleep(BATCH_S)
        loss_of(model, generator).backward()
        with contextlib.suppress(Exception):  # whatever becomes of it here
            optimizer.step()
        optimizer.zero_grad()
        if optimizer.statistics.rounds_committed > 1 and not is_attacking.is_set():
            is_attacking.set()
            attacker.begin()


def join_and_never_come(is_member: bool) -> Attack:
    """It asks for a place in each group, and opens no stream; with a record it is expected."""

    def attack(attacker: Attacker) -> None:
        fingerprint = attacker.manifest().fingerprint()

        async def act(presence: Presence) -> None:
            runs = RunEndpoint(presence.endpoint, RUN_ID)
            addresses = [str(address) for address in presence.endpoint.addresses]
            records = await attacker.honest(presence)
            records.pop(presence.peer_id, None)
            if is_member and records:
                record = max(records.values(), key=lambda record: record.position.step)
                await attacker.publish(presence, position=record.position, lineage_samples=record.lineage_samples)
            me = Member(presence.peer_id, addresses, is_client=False, weight=480.0)
            requests = [
                runs.call(peer_id, JOIN, JoinRequest(fingerprint, record.position, me, 15.0), CALL_S)  # type: ignore[arg-type]
                for peer_id, record in records.items()
                if record.position.step
            ]
            await asyncio.gather(*requests, return_exceptions=True)

        attacker.forever(0.05, act)

    return attack


def lead_and_never_close(is_member: bool) -> Attack:
    """It calls everybody to its group again and again, and never begins the round; with a record it is expected."""

    def attack(attacker: Attacker) -> None:
        fingerprint = attacker.manifest().fingerprint()
        presence = attacker.peer.presence

        async def never(remote: Any, request: JoinRequest) -> JoinResponse:
            await asyncio.sleep(3600.0)
            raise AssertionError

        async def begin() -> None:
            RunEndpoint(presence.endpoint, RUN_ID).handle(JOIN, never)

        attacker.run(begin())

        async def act(presence: Presence) -> None:
            runs = RunEndpoint(presence.endpoint, RUN_ID)
            records = await attacker.honest(presence)
            records.pop(presence.peer_id, None)
            if is_member and records:
                record = max(records.values(), key=lambda record: record.position.step)
                await attacker.publish(presence, position=record.position, lineage_samples=record.lineage_samples)
            calls = [
                runs.call(peer_id, CALL, CallRequest(fingerprint, record.position), CALL_S)  # type: ignore[arg-type]
                for peer_id, record in records.items()
            ]
            await asyncio.gather(*calls, return_exceptions=True)

        attacker.forever(0.05, act)

    return attack


def false_identities(attacker: Attacker) -> None:
    """Twenty of them say that they train at the run's position and have many samples; none ever comes to a round."""
    identities = attacker.more(20)
    shared: dict[str, Any] = {"read_at": 0.0, "leader": None}
    own = {presence.peer_id for presence in identities}

    async def act(presence: Presence) -> None:
        if time.monotonic() > shared["read_at"] + 0.3:
            shared["read_at"] = time.monotonic()
            honest = {k: r for k, r in (await attacker.honest(presence)).items() if k not in own}
            shared["leader"] = max(honest.values(), key=lambda record: record.position.step, default=None)
        if (record := shared["leader"]) is not None:
            await attacker.publish(
                presence, position=record.position, lineage_samples=record.lineage_samples, samples=TARGET // 4
            )

    attacker.forever(0.5, act, *identities)


def signatures_alone(num: int) -> Attack:
    """More of them, without endpoints: one node publishes the records of all."""

    def attack(attacker: Attacker) -> None:
        publish_records_of(attacker, [Identity.generate() for _ in range(num)])

    return attack


def addresses_of_others(attacker: Attacker) -> None:
    """A hundred records, each of which names places where a peer has no business, and a third party."""
    places = [(networks.host(number), SSH_PORT) for number in range(NUM_MEMBERS)]
    addresses = [f"/ip4/{host}/tcp/{port}" for host, port in [*places, *LOCAL_PLACES, THIRD_PARTY]]
    publish_records_of(attacker, [Identity.generate() for _ in range(100)], addresses)


def publish_records_of(attacker: Attacker, identities: list[Identity], addresses: Sequence[str] = ()) -> None:
    for identity in identities:
        print("identity", identity.peer_id, flush=True)
    own = {identity.peer_id for identity in identities}

    async def act(presence: Presence) -> None:
        honest = {k: r for k, r in (await attacker.honest(presence)).items() if k not in own}
        leader = max(honest.values(), key=lambda record: record.position.step)
        fields: dict[str, Any] = {"position": leader.position, "lineage_samples": leader.lineage_samples}
        fields |= {"samples": TARGET // 4} | ({"addresses": addresses} if addresses else {})
        value = msgspec.to_builtins(attacker.record(presence, **fields), builtin_types=(bytes,))
        records = [
            Issuer(identity, DhtConfig(), time.time).issue(
                peer_key(RUN_ID, PROGRESS_KIND), identity.peer_id, value, TTL_S
            )
            for identity in identities
        ]
        for contact in presence.dht.contacts():
            await store_at(presence.endpoint, contact.peer_id, records)

    attacker.forever(0.5, act)


def swallow_the_key(attacker: Attacker) -> None:
    """Nodes that say that they hold what they are given, and know of nothing."""
    identities = attacker.more(7)

    async def become_a_hole(presence: Presence) -> None:
        dht = presence.dht
        holder: Any = next(value for value in vars(dht).values() if type(value).__name__ == "RequestHandlers")
        holder.hold = lambda source, aged: StoreOutcome(is_stored=True, code="stored", is_responsible=True)
        answer = holder.answer

        def nothing_known(remote: Any, request: Any) -> Any:
            return answer(remote, msgspec.structs.replace(request, key="", wants_contacts=True))

        holder.answer = nothing_known

    for presence in identities:
        attacker.run(become_a_hole(presence))

    async def act(presence: Presence) -> None:
        await presence.dht.get(peer_key(RUN_ID, PROGRESS_KIND))

    attacker.forever(0.5, act, *identities)


def manifests(num: int, make: Callable[[RunManifest], bytes]) -> Attack:
    """So many identities sign the same manifest."""

    def attack(attacker: Attacker) -> None:
        identities, value = attacker.more(num), make(attacker.manifest())

        async def act(presence: Presence) -> None:
            declare_run(presence.dht, RUN_ID)
            await presence.dht.store(manifest_key(RUN_ID), zlib.compress(value, 9), 300.0, subkey=presence.peer_id)

        attacker.forever(2.0, act, *identities)

    return attack


def large(own: RunManifest) -> bytes:
    """Small in the DHT; it unpacks to eight megabytes."""
    return msgspec.structs.replace(own, extra={"x": "y" * (8 << 20)}).encoded()


def false(own: RunManifest) -> bytes:
    """Another target, so that honest newcomers do not fit."""
    return msgspec.structs.replace(own, target_batch_size=2 * own.target_batch_size).encoded()


def fill(
    make: Callable[[Attacker, Identity], tuple[str, Any]],
    num: int,
    ttl_s: float,
    hosts: Sequence[str] = (),
    *,
    is_forged: bool = False,
) -> Attack:
    """A stranger fills a key at all its holders, its own nodes too, and says that it trains.

    Args:
        hosts: two further nodes at each of these show so many records.
        is_forged: the records are not signed by their owners.
    """

    def attack(attacker: Attacker) -> None:
        print("identity", attacker.peer.peer_id, flush=True)
        made: list[list[Record]] = []
        for _ in hosts or [attacker.host]:
            made.append([])
            for identity in (Identity.generate() for _ in range(num)):
                key, value = make(attacker, identity)
                record = Issuer(identity, DhtConfig(), time.time).issue(key, identity.peer_id, value, ttl_s)
                made[-1].append(msgspec.structs.replace(record, signature=bytes(64)) if is_forged else record)
        for host, records in zip(hosts, made, strict=False):
            for presence in attacker.more(0, [host, host]):
                show(presence, records)

        async def fill_all(presence: Presence) -> None:
            holders = [contact.peer_id for contact in presence.dht.contacts()]
            show(presence, made[0])
            await asyncio.gather(*(hand_over(presence, peer_id, made[0]) for peer_id in holders))

        attacker.peer.run(fill_all(attacker.peer.presence), 2 * FILL_S, "filling a key")

        async def act(presence: Presence) -> None:
            if (leader := await attacker.leader(presence)) is not None:
                await attacker.publish(presence, position=leader[1].position)

        attacker.forever(0.5, act)

    return attack


def show(presence: Presence, records: Sequence[Record]) -> None:
    """Have a node show these records to all readers of their key, whatever it holds, and whomever they ask for."""
    endpoint, key = presence.endpoint, records[0].key
    assert isinstance(endpoint, InterceptedEndpoint)
    answer: Any = endpoint.handlers[FIND.name]
    shown = sorted(records, key=lambda record: record.subkey)

    def answer_with_all(remote: Any, request: FindRequest) -> FindResponse:
        response = answer(remote, request)
        if request.key != key or not request.wants_records:
            return response
        rest = [record for record in shown if record.subkey > (request.after or "")]
        page, left = [], MAX_FOUND_BYTES
        for record in rest[:MAX_FOUND_RECORDS]:
            left -= record.num_bytes
            if left < 0:
                break
            page.append(AgedRecord(record, 0.0))
        return msgspec.structs.replace(response, records=page, is_responsible=True, is_more=len(page) < len(rest))

    endpoint.answer_with(FIND, answer_with_all)


async def hand_over(presence: Presence, peer_id: Any, records: Sequence[Record]) -> None:
    """Store records at a peer, as fast as it takes them."""
    deadline = asyncio.get_running_loop().time() + FILL_S
    for start in range(0, len(records), MAX_STORED_RECORDS):
        request = StoreRequest([AgedRecord(record, 0.0) for record in records[start : start + MAX_STORED_RECORDS]])
        while asyncio.get_running_loop().time() < deadline:
            try:
                await presence.endpoint.call(peer_id, STORE, request, CALL_S)
                break
            except ManyhandsError:
                await asyncio.sleep(0.1)


def false_lease(attacker: Attacker, identity: Identity) -> tuple[str, Any]:
    """It names the coordinator of the run as its signer."""
    if attacker.charter is None:
        coordinator = Address.parse(attacker.initial_peer).peer_id
        publishers = [coordinator] if coordinator is not None else []
        attacker.charter = attacker.run(read_charters(attacker.peer.dht, RUN_ID, publishers=publishers))[0].charter
    charter, now = attacker.charter, time.time()
    lease = Lease(charter.digest, identity.peer_id, "trainer", now, now + 3600.0)
    signed = SignedLease.sign(identity, lease).signed
    return leases_key(RUN_ID), msgspec.structs.replace(signed, signer=charter.coordinators[0]).encoded()


def foreign_charter(attacker: Attacker, identity: Identity) -> tuple[str, Any]:
    """A valid charter of the same run, with as many coordinators as there may be."""
    charter = Charter(RUN_ID, identity.peer_id, "invite", [identity.peer_id] * 16)
    record = CharterRecord(SignedCharter.sign(identity, charter).signed.encoded())
    return charter_key(RUN_ID), msgspec.to_builtins(record, builtin_types=(bytes,))


def progress_of_stranger(attacker: Attacker, identity: Identity) -> tuple[str, Any]:
    record = attacker.record(attacker.peer.presence, ttl_s=LEASE_RECORD_TTL_S)
    return peer_key(RUN_ID, PROGRESS_KIND), msgspec.to_builtins(record, builtin_types=(bytes,))


def false_account(attacker: Attacker, identity: Identity) -> tuple[str, Any]:
    """It claims the work of a large machine."""
    account = AccountRecord(name="a stranger", step=1, samples_used=1_000_000)
    return metrics_key(RUN_ID, AccountRecord), msgspec.to_builtins(account, builtin_types=(bytes,))


def false_manifest(attacker: Attacker, identity: Identity) -> tuple[str, Any]:
    """Another one for each identity."""
    own = attacker.manifest() if attacker.own_manifest is None else attacker.own_manifest
    attacker.own_manifest = own
    changed = msgspec.structs.replace(own, extra={"of": identity.peer_id})
    return manifest_key(RUN_ID), zlib.compress(changed.encoded(), 9)


def download_slowly(attacker: Attacker) -> None:
    """Many downloads of the state at once, of which nothing is read."""
    open_streams: list[Stream] = []

    async def act(presence: Presence) -> None:
        request = msgspec.msgpack.encode(StateRequest(RUN_ID))
        for peer_id in await attacker.honest(presence):
            if peer_id != presence.peer_id:
                with contextlib.suppress(ManyhandsError):
                    open_streams.append(
                        await presence.endpoint.open_bulk(peer_id, STREAM_KIND, request, CALL_S)  # type: ignore[arg-type]
                    )

    attacker.forever(0.1, act, *attacker.more(4))


def download_again(attacker: Attacker) -> None:
    """It asks for the state again and again, and never trains."""

    async def act(presence: Presence) -> None:
        request = msgspec.msgpack.encode(StateRequest(RUN_ID))
        for peer_id in await attacker.honest(presence):
            if peer_id != presence.peer_id:
                stream = await presence.endpoint.open_bulk(peer_id, STREAM_KIND, request, CALL_S)  # type: ignore[arg-type]
                await stream.receive_into(memoryview(bytearray(4)))
                await stream.close(CALL_S)

    attacker.forever(0.1, act, *attacker.more(4))


def relay_that(spoil: Spoil) -> Attack:
    """Volunteers relay, spoil all that they forward, and say that streams of theirs come from other peers."""

    def spoiling(identity: Identity) -> TlsTransport:
        transport = TlsTransport(identity)
        Spoiling(transport, spoil, HANDSHAKE_BYTES)
        return transport

    def attack(attacker: Attacker) -> None:
        relays = attacker.more(NUM_RELAYS, config=RpcConfig(relay_mbit_s=1000.0), transport_of=spoiling)
        own = {attacker.peer.peer_id, *(one.peer_id for one in relays)}

        async def act(presence: Presence) -> None:
            for peer_id in presence.endpoint.ways():
                if peer_id not in own:
                    with contextlib.suppress(ManyhandsError):
                        await presence.endpoint.open_bulk(peer_id, RELAYED, b"", CALL_S)

        attacker.forever(0.5, act, *relays)

    return attack


def punch_at_others(attacker: Attacker) -> None:
    """It asks all peers to connect to places where a peer has no business, and to a third party."""
    places = [*LOCAL_PLACES, THIRD_PARTY]
    identities = attacker.more(8)
    own = {attacker.peer.peer_id, *(one.peer_id for one in identities)}

    async def act(presence: Presence) -> None:
        for number, peer_id in enumerate(presence.endpoint.ways()):
            if peer_id not in own:
                own_place = networks.host(number % NUM_MEMBERS), SSH_PORT
                texts = [f"/ip4/{host}/tcp/{port}" for host, port in [*places, own_place]]
                with contextlib.suppress(ManyhandsError):
                    await presence.endpoint.call(peer_id, PUNCH, PunchRequest(texts), CALL_S)

    attacker.forever(0.05, act, *identities)


OUTWEIGHS = "-1 x gradient with 100 times the samples"
"""It counts for three members, as many as there are, so that no step leads anywhere."""
ATTACKS: dict[str, Attack] = {
    "a state 50 steps ahead that climbs": branch_with_a_state(50, climb),
    "a state of NaN": branch_with_a_state(1, not_numbers, FURTHER_HOSTS),
    "a state without statistics": branch_with_a_state(1, statistics(None), FURTHER_HOSTS),
    "a state with statistics of shape (0,)": branch_with_a_state(1, statistics(torch.empty(0)), FURTHER_HOSTS),
    "a state with a learning rate of NaN": branch_with_a_state(1, learning_rate_of_nan, FURTHER_HOSTS),
    "a state 50 steps ahead in four networks": branch_with_a_state(50, nothing, num_claimed=NUM_NETWORKS),
    "a state at step 2^53": branch_with_a_state(MAX_COUNT, nothing, FURTHER_HOSTS),
    "a slow donor": branch_with_a_state(1, nothing, serve=serve_slowly, num_claimed=NUM_NETWORKS),
    "slow downloads": download_slowly,
    "a newcomer that is always late": download_again,
    "a huge weight": as_a_member(lambda mean_N, weight: (mean_N, 2.0**52)),
    "values of 3e38": as_a_member(lambda mean_N, weight: (mean_N.fill_(3e38), weight)),
    "-9 x gradient": as_a_member(lambda mean_N, weight: (mean_N.mul_(-9.0), weight)),
    OUTWEIGHS: as_a_member(lambda mean_N, weight: (mean_N.neg_(), 100.0 * weight)),
    "-100 x gradient": as_a_member(lambda mean_N, weight: (mean_N.mul_(-100.0), weight)),
    "a reducer that sends -1 x mean": as_a_reducer(lambda mean: -mean),
    "a reducer that sends -1000 x mean": as_a_reducer(lambda mean: -1000.0 * mean),
    "a place and nobody comes": join_and_never_come(is_member=False),
    "a place with a record and nobody comes": join_and_never_come(is_member=True),
    "a leader that never closes": lead_and_never_close(is_member=False),
    "a leader with a record that never closes": lead_and_never_close(is_member=True),
    "20 false identities": false_identities,
    "200 false identities": signatures_alone(200),
    "1,000 false identities": signatures_alone(1000),
    ADDRESSES: addresses_of_others,
    PUNCHES: punch_at_others,
    **{name: relay_that(spoil) for name, spoil in RELAYS.items()},
    "nodes that swallow the key": swallow_the_key,
    "manifests that unpack": manifests(20, large),
    FALSE_MANIFESTS: manifests(5, false),
    FALSE_LEASES: fill(false_lease, 6000, LEASE_RECORD_TTL_S),
    FOREIGN_CHARTERS: fill(foreign_charter, 3600, LEASE_RECORD_TTL_S),
    STRANGERS_RECORDS: fill(progress_of_stranger, 6000, LEASE_RECORD_TTL_S),
    TWO_MACHINES: fill(progress_of_stranger, 6200, LEASE_RECORD_TTL_S, FURTHER_HOSTS[:2]),
    FORGED_LEASES: fill(false_lease, 6000, LEASE_RECORD_TTL_S, is_forged=True),
    "6,000 progress records in an open run": fill(progress_of_stranger, 6000, LEASE_RECORD_TTL_S, FURTHER_HOSTS[:1]),
    "6,000 false accounts": fill(false_account, 6000, LEASE_RECORD_TTL_S),
    "3,000 different manifests": fill(false_manifest, 3000, LEASE_RECORD_TTL_S),
}
UNSIGNED = {
    "slow downloads",
    "a place and nobody comes",
    "a leader that never closes",
    "nodes that swallow the key",
    "manifests that unpack",
    FALSE_MANIFESTS,
    "a newcomer that is always late",
    *BY_INVITATION,
}
"""What these send carries no signature that anybody could show."""

if __name__ == "__main__":
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    torch.set_num_threads(1)
    make_smaller(span_numel=1)  # as the trainers
    name, host, initial_peer = sys.argv[1:]
    ATTACKS[name](Attacker(host, initial_peer))
