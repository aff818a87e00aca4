"""The charter of a run: its owner, who may take part, and the limits of a member. Pure.

The owner signs the charter once. Its digest is in every ticket, in every lease and in the first call between two peers,
so no other charter can take its place. A charter never changes: a new one needs new tickets and leases.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import base58
import msgspec

from manyhands.access.signed import MAX_BYTES, Signed, decoded, signed_by
from manyhands.base.errors import BadSignature, ConfigError, ProtocolViolation
from manyhands.base.identity import Identity, PeerId, public_key_of
from manyhands.base.run_id import checked_run_id
from manyhands.base.structs import make_ready

DOMAIN = "run-charter"
MAX_COORDINATORS = 16
FILE_PREFIX = "manyhands-charter-1 "
Access = Literal["open", "invite"]


class Limits(msgspec.Struct, frozen=True):
    """Limits for the contribution of one member to a round.

    Attributes:
        max_weight_ratio: its weight, as a multiple of the median of its group; it may earn more than that.
        max_weight_share: its weight, as a share of its group's, in groups of 5 and more.
    Raises:
        ConfigError: one of them breaks its rule.
    """

    max_weight_ratio: float = 3.0
    max_weight_share: float = 0.25

    def __post_init__(self) -> None:
        if not 1 <= self.max_weight_ratio < math.inf:
            raise ConfigError(
                f"max_weight_ratio is {self.max_weight_ratio:g}; it must be finite and at least 1, for example 10"
            )
        if not 0 < self.max_weight_share <= 1:
            raise ConfigError(
                f"max_weight_share is {self.max_weight_share:g}; it must be above 0 and at most 1, for example 0.25"
            )


class Charter(msgspec.Struct, frozen=True):
    """The rules of a run, as its owner signs them.

    Attributes:
        run_id: name of the run.
        owner: peer id of the owner key, which signs the charter.
        access: ``open`` to all except banned peers, or ``invite``: only for peers with a lease.
        coordinators: peer ids that may sign leases and bans in the owner's place.
        manifest: fingerprint of the run manifest; empty as long as it is not known.
        limits: the limits of each member.
        created_at: seconds since 1970.
    """

    run_id: str
    owner: str
    access: Access = "open"
    coordinators: Annotated[list[str], msgspec.Meta(max_length=MAX_COORDINATORS)] = []
    manifest: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    limits: Limits = Limits()
    created_at: float = 0.0

    def __post_init__(self) -> None:
        checked_run_id(self.run_id)
        for peer_id in (self.owner, *self.coordinators):
            public_key_of(PeerId(peer_id))
        if len(self.manifest) not in (0, 32):
            raise ValueError("the fingerprint of a manifest has 32 bytes")
        if not math.isfinite(self.created_at):
            raise ValueError(f"created_at is {self.created_at}; it must be finite")


make_ready(Charter)


@dataclass(frozen=True)
class SignedCharter:
    """A charter with a verified signature.

    Attributes:
        digest: SHA-256 of the signed bytes; identifies the charter in tickets and leases.
    """

    charter: Charter
    signed: Signed

    @classmethod
    def sign(cls, owner: Identity, charter: Charter) -> SignedCharter:
        """Sign a charter with the key of its owner."""
        assert charter.owner == owner.peer_id, "the owner in a charter is the key that signs it"
        return cls(charter, signed_by(owner, DOMAIN, charter))

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> SignedCharter:
        """Read and verify a charter that came from a peer.

        Raises:
            ProtocolViolation, BadSignature: it is not a valid charter.
        """
        signed = decoded(raw, source)
        charter = signed.verified(DOMAIN, Charter, source)
        if charter.owner != signed.signer:
            raise BadSignature(source, "the charter is not signed by the owner that it names")
        return cls(charter, signed)

    @classmethod
    def load(cls, path: str | Path) -> SignedCharter:
        """Read the file that :meth:`save` wrote.

        Raises:
            ConfigError: there is no such file, or it holds something else.
        """
        path = Path(path)
        try:
            with path.open("rb") as file:
                text = file.read(2 * MAX_BYTES)
            word = text.decode("ascii").split("\n")[0].removeprefix(FILE_PREFIX)
            return cls.from_bytes(base58.b58decode_check(word), str(path))
        except OSError as error:
            raise ConfigError(
                f"charter {path}: {error.strerror}; name the file that manyhands run create has written"
            ) from error
        except (ValueError, ProtocolViolation, BadSignature) as error:
            raise ConfigError(
                f"{path} is not a charter, or was changed; name the file that manyhands run create has written"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the charter to a new file: one line for programs, then the content for people.

        Raises:
            ConfigError: the file exists, or cannot be written.
        """
        shown = msgspec.json.format(msgspec.json.encode(self.described())).decode()
        try:
            with Path(path).open("x", encoding="utf-8") as file:
                file.write(f"{FILE_PREFIX}{base58.b58encode_check(self.signed.encoded()).decode()}\n{shown}\n")
        except FileExistsError as error:
            raise ConfigError(f"charter {path} exists, and is not overwritten; name another file") from error
        except OSError as error:
            raise ConfigError(f"charter {path}: {error.strerror}; name a file that can be written") from error

    def described(self) -> dict[str, object]:
        """Return the content as plain values; fingerprint and digest in hexadecimal."""
        return {
            **msgspec.to_builtins(self.charter, builtin_types=(bytes,)),
            "manifest": self.charter.manifest.hex(),
            "digest": self.digest.hex(),
        }

    @functools.cached_property
    def digest(self) -> bytes:
        return self.signed.digest

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.charter.run_id

    @property
    def is_open(self) -> bool:
        """Whether peers need no lease."""
        return self.charter.access == "open"

    @functools.cached_property
    def coordinators(self) -> tuple[PeerId, ...]:
        """Peers that may sign leases, invitations and bans; the owner is the last one."""
        return tuple(dict.fromkeys(map(PeerId, (*self.charter.coordinators, self.charter.owner))))
