"""Limits and periods of control connections."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RpcConfig:
    """Settings of the connections of a peer.

    Attributes:
        heartbeat_period_s: silence after which a peer is pinged.
        heartbeat_timeout_s: silence after which a peer is lost; checked four times in a period, so that a frozen or
            disconnected peer is noticed in under 10 s.
        hello_timeout_s: time for the hello of a new stream to arrive.
        dial_timeout_s: for TCP, TLS and hello together.
        max_requests_per_connection: concurrent calls of one peer; more are refused.
        idle_timeout_s: time without calls after which both ends agree to close a control connection. One that is used
            in each upkeep of the DHT (``refresh_period_s``) is kept, and so are those of peers in client mode, as these
            cannot be dialled.
        max_connections: open control connections. Above that, the one that was unused for longest is closed; if all
            are in use, the next peer is refused.
        max_upload_mbit_s: megabits per second that all bulk streams together may send; None is no limit.
        relay_mbit_s: megabits per second that this peer forwards between others that cannot dial each other, bulk
            streams of all of them together; None forwards no bulk streams.
        max_known_addresses: peers whose addresses are remembered; the least recently learned is dropped first.
    """

    heartbeat_period_s: float = 4.0
    heartbeat_timeout_s: float = 8.5
    hello_timeout_s: float = 5.0
    dial_timeout_s: float = 5.0
    max_requests_per_connection: int = 256
    idle_timeout_s: float = 60.0
    max_connections: int = 1024
    max_upload_mbit_s: float | None = None
    relay_mbit_s: float | None = None
    max_known_addresses: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_period_s < self.heartbeat_timeout_s:
            raise ConfigError(
                f"heartbeat_period_s={self.heartbeat_period_s} and heartbeat_timeout_s={self.heartbeat_timeout_s}: "
                "the timeout must be longer than the period; for example 4 and 8.5"
            )
        for name, value, otherwise in (
            ("max_upload_mbit_s", self.max_upload_mbit_s, "None for no limit"),
            ("relay_mbit_s", self.relay_mbit_s, "None to relay no bulk data"),
        ):
            if value is not None and not value > 0:
                raise ConfigError(
                    f"{name}={value}: a number of megabits per second above 0 is needed, such as 20, or {otherwise}"
                )
