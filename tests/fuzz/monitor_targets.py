"""Fuzz targets: what peers publish for monitors, and what monitors tell each other, up to the credit that follows."""

from __future__ import annotations

import functools
import hashlib

import msgspec

from manyhands.averaging.messages import Position
from manyhands.base.errors import ProtocolViolation
from manyhands.dht.records import decode_value, encode_value
from manyhands.monitor.coordinator_exchange import (
    HISTORY,
    HistoryRequest,
    HistoryResponse,
    ToldEvent,
    ToldPeer,
    ToldPoint,
    ToldStep,
)
from manyhands.monitor.credit import Credit, CreditedStep
from manyhands.optim.metrics import AccountRecord, CommittedStep, RecentSteps
from tests.fuzz.target import Target, decoded
from tests.network import identity_of

PEERS = [identity_of(number).peer_id for number in range(1, 4)]
SHARES = dict.fromkeys(PEERS, 8.0)
BEGIN = Position(6, hashlib.sha256(b"begin").digest())
END = Position(7, hashlib.sha256(b"end").digest())


@functools.lru_cache
def _made() -> list[CommittedStep]:
    recent = RecentSteps(PEERS[0])
    recent.add(BEGIN, END, SHARES)
    return recent.listed()


def _account(data: bytes) -> None:
    """Forged lists must not be credited: the digests are not of the majority's list, or nobody else signs them."""
    account = msgspec.convert(decode_value(data), AccountRecord)
    credit = Credit()
    honest = AccountRecord(steps=_made())
    credit.look({PEERS[0]: honest, PEERS[1]: honest, PEERS[2]: account}, dict.fromkeys(PEERS[:2], END), 0.0)
    assert credit.num_samples == 24
    assert {credit.total_of(peer_id).samples for peer_id in PEERS} == {8}


def _history_response(data: bytes) -> None:
    answer = decoded(data, HistoryResponse)
    credit = Credit()
    credit.look({peer_id: AccountRecord(steps=_made()) for peer_id in PEERS}, dict.fromkeys(PEERS, END), 0.0)
    credit.add_told(CreditedStep(step.step, step.after, 0, step.shares) for step in answer.steps)
    assert credit.num_samples >= 24


TARGETS = [
    Target(
        name="run.account-record",
        seeds=[
            encode_value(msgspec.to_builtins(account, builtin_types=(bytes,)))
            for account in (
                AccountRecord(name="ann", step=7, failure="late", steps=_made()),
                AccountRecord(learning_rate=0.01, has_left=True),
            )
        ],
        run=_account,
        errors=(ValueError,),
    ),
    Target(
        name=f"{HISTORY.name}.request",
        seeds=[msgspec.msgpack.encode(HistoryRequest("points", 7)), msgspec.msgpack.encode(HistoryRequest("events"))],
        run=lambda data: decoded(data, HistoryRequest),
        errors=(ProtocolViolation,),
        weight=0.2,
    ),
    Target(
        name=f"{HISTORY.name}.response",
        seeds=[
            msgspec.msgpack.encode(
                HistoryResponse(
                    [ToldPoint(1.8e9, 3, 4.5, None, 24, 2.5, 3, 0.01, 1000)],
                    [ToldStep(3, b"8 bytes.", _made()[0].shares)],
                    [ToldEvent(1.8e9, "joined", "ann has joined", 3, PEERS[0], "ann")],
                    [ToldPeer(PEERS[0], "ann")],
                )
            )
        ],
        run=_history_response,
        errors=(ProtocolViolation,),
    ),
]
