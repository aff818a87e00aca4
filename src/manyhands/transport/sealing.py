"""Encrypted records of a bulk connection, with keys from its TLS session.

TLS authenticates both ends, and the client sends a secret through it. Then follow records of up to 256 KiB instead
of TLS's 16 KiB, directly from and into the caller's memory:

    length of the plaintext (4 bytes, big endian, at least 1) | ciphertext | tag (16 bytes)

Each is sealed with AES-256-GCM, or with ChaCha20-Poly1305 if TLS negotiated it (RFC 5116). The nonce is the number of
the record, and the length is authenticated data. Records therefore open in order only: none can be altered, omitted,
repeated or inserted from elsewhere. After 2^14 records (4 GiB at most) the key is replaced.

docs/adr/0006 and 0040 argue why this is as safe as TLS, and what it saves.
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
SECRET_BYTES = 32
RECORDS_OF_ONE_KEY = 1 << 14
FIRST_BYTES = 4096
"""Size of the first buffer, enough for a first message. A longer record gets a buffer once its header has arrived."""

TLS_ALERT = 0x1503
"""The first bytes of a TLS alert; a client completes its handshake before the server has checked its certificate."""


class BadRecord(Exception):
    """Received bytes are not the next record that the other end sealed."""


class _Keys:
    """The sequence of keys of one direction.

    Args:
        secret: 32 bytes, for this direction only.
        is_chacha: whether to use ChaCha20-Poly1305.
        records_of_one_key: number of records after which the key is replaced.
    """

    def __init__(self, secret: bytes, *, is_chacha: bool = False, records_of_one_key: int = RECORDS_OF_ONE_KEY) -> None:
        self._secret = secret
        self._algorithm = ChaCha20Poly1305 if is_chacha else AESGCM
        self._records_of_one_key = records_of_one_key
        self._number = 0

    def next(self) -> tuple[AESGCM | ChaCha20Poly1305, bytes]:
        """Return key and nonce of the next record."""
        epoch, number_in_epoch = divmod(self._number, self._records_of_one_key)
        if number_in_epoch == 0:
            info = b"manyhands bulk key " + epoch.to_bytes(8, "big")
            self._key = self._algorithm(HKDFExpand(SHA256(), 32, info).derive(self._secret))
        nonce = self._number.to_bytes(12, "big")
        self._number += 1
        return self._key, nonce


class Sealer(_Keys):
    """Seals the records of one direction; see :class:`_Keys`."""

    def seal_into(self, plaintext: memoryview, out: memoryview) -> int:
        """Write a record of 1 to ``CHUNK_BYTES`` plaintext bytes to the start of ``out``; return its length."""
        key, nonce = self.next()
        stop = HEADER_BYTES + len(plaintext) + TAG_BYTES
        header = out[:HEADER_BYTES]
        header[:] = len(plaintext).to_bytes(HEADER_BYTES, "big")
        key.encrypt_into(nonce, plaintext, header, out[HEADER_BYTES:stop])
        return stop


class Opener(_Keys):
    """Opens the records of one direction, in order; see :class:`_Keys`."""

    def open_into(self, record: memoryview, out: memoryview) -> None:
        """Decrypt a whole record into ``out``, which has the length of the plaintext.

        Raises:
            BadRecord: it is not the next record that the other end sealed.
        """
        key, nonce = self.next()
        try:
            key.decrypt_into(nonce, record[HEADER_BYTES:], record[:HEADER_BYTES], out)
        except InvalidTag as error:
            raise BadRecord("a record was altered on its way") from error


class RecordBuffer:
    """Buffers the received bytes of one direction.

    Receive into :meth:`room`, report it with :meth:`added`, then take.

    Args:
        opener: of the direction.
        received: bytes that have already arrived.
    """

    def __init__(self, opener: Opener, received: bytes = b"") -> None:
        self._opener = opener
        self._memory = memoryview(bytearray(max(FIRST_BYTES, len(received))))
        self._memory[: len(received)] = received
        self._start = 0
        self._stop = len(received)
        self._scratch = memoryview(b"")
        self._opened = memoryview(b"")
        self._known_bytes = 0  # size of the next record, once its header has arrived

    @property
    def is_ready(self) -> bool:
        """Whether there is data to take.

        Raises:
            BadRecord: an invalid length.
        """
        return bool(len(self._opened)) or self._stop - self._start >= self._record_bytes()

    def rest(self) -> None:
        """Release the memory for long records, unless it holds data."""
        if self._start == self._stop and len(self._memory) > FIRST_BYTES:
            give_back_room(self._memory)
            self._memory = memoryview(bytearray(FIRST_BYTES))
            self._start = 0
            self._stop = 0
        if not len(self._opened):
            self._scratch = memoryview(b"")
            self._opened = memoryview(b"")

    def room(self) -> memoryview:
        """Return memory to receive into, not empty; call it only when no data is ready."""
        num_received = self._stop - self._start
        num_bytes = self._record_bytes()
        if self._start + num_bytes > len(self._memory):
            rest = bytes(self._memory[self._start : self._stop])
            if num_bytes > len(self._memory):
                give_back_room(self._memory)
                self._memory = take_room(num_bytes)
            self._memory[:num_received] = rest
            self._start = 0
            self._stop = num_received
        return self._memory[self._stop :]

    def added(self, num_bytes: int) -> None:
        """Note that the first ``num_bytes`` of the last :meth:`room` were received."""
        self._stop += num_bytes

    def take_into(self, view: memoryview, max_records: int | None = None) -> int:
        """Decrypt received data into ``view``, up to its size; return the number of bytes.

        Args:
            max_records: maximum of records to open in this call.
        Raises:
            BadRecord: the data is not the records of the other end.
        """
        num_taken = 0
        num_opened = 0
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
        """Open a record directly into ``view`` if it fits, else into a scratch buffer."""
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
            self._start = 0
            self._stop = 0
        if is_whole:
            return num_plain
        self._opened = out
        return 0

    def _record_bytes(self) -> int:
        """Return the size of the next record, or of its header while that has not arrived."""
        if self._known_bytes:
            return self._known_bytes
        if self._stop - self._start < HEADER_BYTES:
            return HEADER_BYTES
        num_plain = int.from_bytes(self._memory[self._start : self._start + HEADER_BYTES], "big")
        if num_plain >> 16 == TLS_ALERT:
            raise BadRecord("the other end refused the TLS handshake")
        if not 1 <= num_plain <= CHUNK_BYTES:
            raise BadRecord(f"a record of {num_plain} bytes; 1 to {CHUNK_BYTES} are allowed")
        self._known_bytes = RECORD_EXTRA_BYTES + num_plain
        return self._known_bytes
