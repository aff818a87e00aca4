"""Records of a bulk connection, encrypted with keys from its TLS session.

TLS proves who is at both ends, and both export a secret for each direction from it (RFC 8446, section 7.5). What
follows the handshake are records of up to 256 KiB instead of TLS's 16 KiB, straight from and into the caller's memory:

    length of the plaintext (4 bytes, big endian, at least 1) | ciphertext | tag (16 bytes)

Each is sealed with AES-256-GCM, or with ChaCha20-Poly1305 if that is what TLS agreed on (RFC 5116). The nonce is the
number of the record, the length is authenticated with it. Records therefore open in their order only: none can be
altered, left out, repeated or taken over from elsewhere. After 2^14 records (4 GiB at most) the key is replaced.

docs/adr/0006 argues why this is as safe as TLS, and says what it saves.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from manyhands.transport.chunks import CHUNK_BYTES
from manyhands.transport.record_memory import give_back_room, take_room

HEADER_BYTES = 4
TAG_BYTES = 16
RECORD_EXTRA_BYTES = HEADER_BYTES + TAG_BYTES
MAX_RECORD_BYTES = CHUNK_BYTES + RECORD_EXTRA_BYTES
SECRET_BYTES = 32
RECORDS_OF_ONE_KEY = 1 << 14
FIRST_BYTES = 4096
"""Memory for what comes first, a message; it grows when a longer record is announced."""


TLS_ALERT = 0x1503
"""How an alert of TLS begins; a client is done with the handshake before the server has looked at its certificate."""


class BadRecord(Exception):
    """What came was not sealed by the other end, or not as the next record."""


class _Keys:
    """The keys of one direction, one after the other.

    Args:
        secret: of 32 bytes, for this direction only.
        is_chacha: whether to use ChaCha20-Poly1305.
        records_of_one_key: after so many, the next key is used.
    """

    def __init__(self, secret: bytes, *, is_chacha: bool = False, records_of_one_key: int = RECORDS_OF_ONE_KEY) -> None:
        self._secret = secret
        self._algorithm = ChaCha20Poly1305 if is_chacha else AESGCM
        self._records_of_one_key = records_of_one_key
        self._number = 0

    def next(self) -> tuple[AESGCM | ChaCha20Poly1305, bytes]:
        """Key and nonce of the next record."""
        epoch, is_later = divmod(self._number, self._records_of_one_key)
        if not is_later:
            info = b"manyhands bulk key " + epoch.to_bytes(8, "big")
            self._key = self._algorithm(HKDFExpand(SHA256(), 32, info).derive(self._secret))
        nonce = self._number.to_bytes(12, "big")
        self._number += 1
        return self._key, nonce


class Sealer(_Keys):
    """Makes the records of one direction; see :class:`_Keys`."""

    def seal_into(self, plaintext: memoryview, out: memoryview) -> int:
        """Write a record of 1 to ``CHUNK_BYTES`` bytes to the begin of ``out``; returns its length."""
        key, nonce = self.next()
        stop = HEADER_BYTES + len(plaintext) + TAG_BYTES
        header = out[:HEADER_BYTES]
        header[:] = len(plaintext).to_bytes(HEADER_BYTES, "big")
        key.encrypt_into(nonce, plaintext, header, out[HEADER_BYTES:stop])
        return stop


class Opener(_Keys):
    """Opens the records of one direction, in their order; see :class:`_Keys`."""

    def open_into(self, record: memoryview, out: memoryview) -> None:
        """Decrypt a whole record into ``out``, which has the length of the plaintext.

        Raises:
            BadRecord: it is not what the other end sealed next.
        """
        key, nonce = self.next()
        try:
            key.decrypt_into(nonce, record[HEADER_BYTES:], record[:HEADER_BYTES], out)
        except InvalidTag as error:
            raise BadRecord("a record was altered on its way") from error


class RecordBuffer:
    """What has come of a direction, until somebody takes it.

    Receive into :meth:`room`, tell with :meth:`added`, then take.

    Args:
        opener: of the direction.
        received: what came already.
    """

    def __init__(self, opener: Opener, received: bytes = b"") -> None:
        self._opener = opener
        self._memory = memoryview(bytearray(max(FIRST_BYTES, len(received))))
        self._memory[: len(received)] = received
        self._start, self._stop = 0, len(received)
        self._scratch = self._opened = memoryview(b"")
        self._known_bytes = 0  # of the record that comes, once its header has come

    @property
    def is_ready(self) -> bool:
        """Whether there is something to take.

        Raises:
            BadRecord: a length that no record has.
        """
        return bool(len(self._opened)) or self._stop - self._start >= self._record_bytes()

    def expect_long(self) -> None:
        """Long records will come: have the memory for them."""
        if len(self._memory) < MAX_RECORD_BYTES:
            memory = take_room()
            memory[: len(self._memory)] = self._memory
            self._memory = memory

    def rest(self) -> None:
        """No long records will come for a while: let go of the memory for them, unless something lies in it."""
        if self._start == self._stop and len(self._memory) >= MAX_RECORD_BYTES:
            give_back_room(self._memory)
            self._memory = memoryview(bytearray(FIRST_BYTES))
            self._start = self._stop = 0
        if not len(self._opened):
            self._scratch = self._opened = memoryview(b"")

    def room(self) -> memoryview:
        """Memory for what comes next, not empty; call it when nothing is ready to be taken."""
        num_received = self._stop - self._start
        if self._start + self._record_bytes() > len(self._memory):
            rest = self._memory[self._start : self._stop]
            if self._record_bytes() > len(self._memory):
                self.expect_long()
            self._memory[:num_received] = bytes(rest)
            self._start, self._stop = 0, num_received
        return self._memory[self._stop :]

    def added(self, num_bytes: int) -> None:
        """The first ``num_bytes`` of the last :meth:`room` have come."""
        self._stop += num_bytes

    def take_into(self, view: memoryview, max_records: int | None = None) -> int:
        """Decrypt what has come into ``view``, as far as it reaches; returns the number of bytes.

        Args:
            max_records: open no more than so many in one go.
        Raises:
            BadRecord: something else than the records of the other end.
        """
        num_taken = num_opened = 0
        while num_taken < len(view) and self.is_ready:
            if not len(self._opened):
                if num_opened == max_records:
                    break
                num_opened += 1
                num_taken += self._open(view[num_taken:])
            num_copied = min(len(self._opened), len(view) - num_taken)
            view[num_taken : num_taken + num_copied] = self._opened[:num_copied]
            self._opened = self._opened[num_copied:]
            num_taken += num_copied
        return num_taken

    def _open(self, view: memoryview) -> int:
        """Open a record into ``view`` if there is room for all of it, else into memory of its own."""
        record = self._memory[self._start : self._start + self._record_bytes()]
        num_plain = len(record) - RECORD_EXTRA_BYTES
        is_whole = num_plain <= len(view)
        if not is_whole and len(self._scratch) < num_plain:
            self._scratch = memoryview(bytearray(num_plain))
        out = view[:num_plain] if is_whole else self._scratch[:num_plain]
        self._opener.open_into(record, out)
        self._start += len(record)
        self._known_bytes = 0
        if self._start == self._stop:
            self._start = self._stop = 0
        if is_whole:
            return num_plain
        self._opened = out
        return 0

    def _record_bytes(self) -> int:
        """Of the record that comes; of its header, while that has not come."""
        if self._known_bytes:
            return self._known_bytes
        if self._stop - self._start < HEADER_BYTES:
            return HEADER_BYTES
        num_plain = int.from_bytes(self._memory[self._start : self._start + HEADER_BYTES], "big")
        if num_plain >> 16 == TLS_ALERT:
            raise BadRecord("the other end refused the TLS handshake")
        if not 1 <= num_plain <= CHUNK_BYTES:
            raise BadRecord(f"a record of {num_plain} bytes")
        self._known_bytes = RECORD_EXTRA_BYTES + num_plain
        return self._known_bytes
