"""Limits and periods of the calls between peers."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RpcConfig:
    """How a peer keeps its control connections.

    Attributes:
        heartbeat_period_s: a peer that was silent for this long is pinged.
        heartbeat_timeout_s: a peer from which nothing came for so long is lost; it is looked at four times in a period,
            so a frozen or cut-off peer is noticed in under 10 s.
        hello_timeout_s: a new stream must say what it is for within this time.
        dial_timeout_s: for TCP, TLS and hello together.
        max_requests_per_connection: calls of one peer that are served at once; more are refused.
        idle_timeout_s: a control connection that nobody used for so long is closed, by both ends in agreement. By then
            its heartbeats have cost about as much as dialling anew. One that is used again and again is kept for twice
            the longest pause so far, four times this at most. Those of peers in client mode are kept, as nobody
            could dial them.
        max_connections: open control connections; above it the one that was unused for longest makes room, and without
            one the next peer is turned down.
        max_upload_mbit_s: megabits per second that all bulk streams together may send; None is no limit.
        max_known_addresses: peers whose addresses are remembered; the least recently learnt is forgotten first.
    """

    heartbeat_period_s: float = 4.0
    heartbeat_timeout_s: float = 8.5
    hello_timeout_s: float = 5.0
    dial_timeout_s: float = 5.0
    max_requests_per_connection: int = 256
    idle_timeout_s: float = 20.0
    max_connections: int = 1024
    max_upload_mbit_s: float | None = None
    max_known_addresses: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_period_s < self.heartbeat_timeout_s:
            raise ConfigError(
                f"heartbeat_period_s={self.heartbeat_period_s} and heartbeat_timeout_s={self.heartbeat_timeout_s}: "
                "the timeout must be longer than the period; for example 4 and 8.5"
            )
        if self.max_upload_mbit_s is not None and not self.max_upload_mbit_s > 0:
            raise ConfigError(
                f"max_upload_mbit_s={self.max_upload_mbit_s}: a number of megabits per second above 0 is needed, such "
                "as 20, or None for no limit"
            )
