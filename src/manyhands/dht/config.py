"""The settings of a DHT node."""

from __future__ import annotations

from dataclasses import dataclass, fields

from manyhands.base.errors import ConfigError

# Limits of the wire format: together they keep the largest message within a frame of 1 MiB.
MAX_CONTACTS = 64  # in one reply
MAX_FOUND_RECORDS = 1024  # in one reply
MAX_FOUND_BYTES = 1 << 19
MAX_NAMED = 1024  # owners in one request
MAX_STORED_RECORDS = 12  # in one request
MAX_VALUE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class DhtConfig:
    """Settings of one node. Nodes of a run may differ in all of them; the defaults suit runs of up to 1000 peers.

    Attributes:
        k: contacts in a bucket, and the nearest ones that a lookup must have asked. With 20, it is most unlikely that
            all of them leave within an hour (Maymounkov & Mazieres 2002, section 2.2).
        alpha: concurrent requests of a lookup; a few, so that one dead peer does not stop it. A lookup of the holders
            of a key makes as many as there are holders, if these are more.
        replicas: peers nearest to a key that hold its records; with 5, one in 1000 records is lost when a quarter
            of all peers vanish at once.
        max_failures: failed requests in a row after which a contact is dropped; 2, as the network may cause one.
        request_timeout_s: timeout of one request; several round trips of the slowest link, and a reconnection.
        slow_after_s: time without a reply after which a lookup also asks other contacts; a dial and a call take four
            round trips.
        lookup_timeout_s: timeout of a whole lookup, which then returns what it has found.
        join_timeout_s: timeout for reaching the initial peers and learning the neighbours from them; 6, so that a
            command with a wrong address ends within 10 s, and a dial at a round trip of 1 s succeeds.
        refresh_period_s: mean time between two rounds of upkeep; a newcomer near a key waits half of it on average for
            the records that it should hold.
        max_ttl_s: longest lifetime of a record; a day, so that records that nobody renews expire.
        max_value_bytes: largest encoded value; the DHT is for small records, bulk data has connections of its own.
        max_clock_skew_s: tolerated difference between the wall clocks of two peers; an unset clock on a rented machine
            is off by about a minute. Peers within it lose nothing.
        max_records: records that this node holds for others, in total.
        max_bytes: their total size, with 256 bytes of overhead each.
        max_records_per_key: subkeys of one key. Unsigned records may take half of them, so that they never displace
            signed ones, and records from one network three quarters.
        max_bytes_per_key: the same for their size.
        max_records_per_owner: signed records of one owner, so that one key pair cannot fill this node.
        max_bytes_per_owner: the same for their size.
        max_records_per_source: records from one machine (an IP address, or a /64 of IPv6), which may have many key
            pairs.
        max_bytes_per_source: the same for their size.
        max_requests_per_s_of_peer: request rate of one peer, with bursts of five seconds' worth; more are refused.
        max_requests_per_s_of_host: the same for all peers of one machine.
    """

    k: int = 20
    alpha: int = 3
    replicas: int = 5
    max_failures: int = 2
    request_timeout_s: float = 3.0
    slow_after_s: float = 1.0
    lookup_timeout_s: float = 10.0
    join_timeout_s: float = 6.0
    refresh_period_s: float = 30.0
    max_ttl_s: float = 86400.0
    max_value_bytes: int = MAX_VALUE_BYTES
    max_clock_skew_s: float = 60.0
    max_records: int = 50_000
    max_bytes: int = 1 << 26
    max_records_per_key: int = 8192
    max_bytes_per_key: int = 1 << 23
    max_records_per_owner: int = 1024
    max_bytes_per_owner: int = 1 << 22
    max_records_per_source: int = 25_000
    max_bytes_per_source: int = 1 << 25
    max_requests_per_s_of_peer: float = 100.0
    max_requests_per_s_of_host: float = 1000.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{field.name} is {value}; a number above 0 is needed, such as {field.default}")
        self._check_at_most("k", MAX_CONTACTS, "the most contacts in one reply")
        self._check_at_most("replicas", self.k, "k, the number of peers that a lookup finds")
        self._check_at_most("max_value_bytes", MAX_VALUE_BYTES, "the most bytes of a value in one message")

    def _check_at_most(self, name: str, limit: int, limit_is: str) -> None:
        if getattr(self, name) > limit:
            raise ConfigError(f"{name} is {getattr(self, name)}; it may be at most {limit} ({limit_is})")
