"""Mutual TLS 1.3 of one connection as a state machine without I/O: ``ssl`` of Python over memory buffers."""

from __future__ import annotations

import secrets
import ssl
import tempfile
from contextlib import suppress
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from manyhands.base.identity import Identity, PeerId
from manyhands.transport.certificate import (
    ALPN,
    BULK_ALPN,
    issuer_certificate,
    leaf_certificate,
    peer_id_of_certificate,
)
from manyhands.transport.sealing import SECRET_BYTES, Opener, Sealer


class TlsFailed(Exception):
    """The handshake failed, or the received bytes are not TLS.

    Attributes:
        is_stranger: the other end has a certificate that is not one of a peer.
    """

    def __init__(self, message: str, *, is_stranger: bool = False) -> None:
        super().__init__(message)
        self.is_stranger = is_stranger


class TlsEnded(Exception):
    """The other end has closed its side of the session."""


def tls_context(identity: Identity, *, is_server: bool, alpn: str = ALPN) -> ssl.SSLContext:
    """Create the TLS settings of one side: version 1.3 only, certificates on both sides, no session resumption.

    The remote end is identified by its peer id, so host names are not checked.

    Args:
        alpn: the protocol that a client offers; a server accepts both.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=issuer_certificate().public_bytes(Encoding.DER))
    if is_server:
        context.num_tickets = 0
    context.set_alpn_protocols([ALPN, BULK_ALPN] if is_server else [alpn])
    _load_identity(context, identity)
    return context


def _load_identity(context: ssl.SSLContext, identity: Identity) -> None:
    """Give the key and certificate to ``context``, which reads them from files only.

    The key is encrypted in its file, under a password that exists in this function alone.
    """
    password = secrets.token_hex(16)
    encryption = BestAvailableEncryption(password.encode())
    key = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    certificate = leaf_certificate(identity).public_bytes(Encoding.PEM)
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        path = Path(folder) / "identity.pem"
        path.write_bytes(key + certificate)
        context.load_cert_chain(path, password=password)


class TlsSession:
    """The TLS state of one connection. Not thread-safe.

    Args:
        context: made by :func:`tls_context` for the same side.
    """

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._is_shaken = False
        self._bulk_secret = b""
        self._failure: TlsFailed | TlsEnded | None = None
        self.is_server = is_server

    # the handshake

    def handshake(self) -> bool:
        """Continue the handshake; return whether it is over. Before and after, send the output of :meth:`ciphertext`.

        On a bulk connection it ends with the secret for :meth:`sealing`, from the client to the server.

        Raises:
            TlsFailed: it failed.
        """
        if not self._is_shaken:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLError as error:
                raise _failure(error) from error
            self._is_shaken = True
            if self.is_bulk and not self.is_server:
                self._bulk_secret = secrets.token_bytes(SECRET_BYTES)
                self.write(memoryview(self._bulk_secret))
        if self.is_bulk and self.is_server:
            self._read_bulk_secret()
        return not self.is_bulk or len(self._bulk_secret) == SECRET_BYTES

    def _read_bulk_secret(self) -> None:
        received = bytearray(SECRET_BYTES - len(self._bulk_secret))
        try:
            num_bytes = self.read_into(memoryview(received))
        except TlsEnded as error:
            raise TlsFailed("closed in the handshake") from error
        self._bulk_secret += received[:num_bytes]

    @property
    def selected_alpn(self) -> str:
        """The protocol that both ends negotiated; empty if none."""
        return self._tls.selected_alpn_protocol() or ""

    @property
    def is_bulk(self) -> bool:
        """Whether :meth:`sealing` replaces TLS once the handshake is over."""
        return self.selected_alpn == BULK_ALPN

    def remote_peer_id(self) -> PeerId | None:
        """Return the peer id in the other end's certificate, or None if it contains none."""
        certificate = self._tls.getpeercert(binary_form=True)
        return peer_id_of_certificate(certificate) if certificate is not None else None

    # afterwards, on a bulk connection

    def sealing(self) -> tuple[Sealer, Opener]:
        """Return the sealer and opener of this end. Each direction has a key of its own, derived from one secret."""
        cipher = self._tls.cipher()
        is_chacha = cipher is not None and "CHACHA20" in cipher[0]
        from_client = HKDFExpand(SHA256(), SECRET_BYTES, b"manyhands bulk from client").derive(self._bulk_secret)
        from_server = HKDFExpand(SHA256(), SECRET_BYTES, b"manyhands bulk from server").derive(self._bulk_secret)
        sent, received = (from_server, from_client) if self.is_server else (from_client, from_server)
        return Sealer(sent, is_chacha=is_chacha), Opener(received, is_chacha=is_chacha)

    def rest(self) -> bytes:
        """Return the bytes that arrived after the handshake, which are not TLS."""
        return self._incoming.read()

    # afterwards, on a control connection

    @property
    def is_over(self) -> bool:
        """Whether no more data can be read; the next :meth:`read_into` raises the reason."""
        return self._failure is not None

    def received(self, ciphertext: memoryview) -> None:
        """Add bytes received from the network."""
        self._incoming.write(ciphertext)

    def read_into(self, view: memoryview) -> int:
        """Decrypt received data directly into ``view``, until it is full or more ciphertext is needed.

        Returns:
            The number of bytes; 0 when more ciphertext is needed.
        Raises:
            TlsEnded: no more data will arrive.
            TlsFailed: the data was altered, or is not TLS.
        """
        num_bytes = 0
        while num_bytes < len(view) and self._failure is None:
            try:
                # with a buffer it returns a count; the stubs know only bytes
                num_read: int = self._tls.read(len(view) - num_bytes, view[num_bytes:])  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                return num_bytes
            except ssl.SSLError as error:
                self._failure = _failure(error)
            else:
                num_bytes += num_read
                if num_read == 0:
                    self._failure = TlsEnded()
        if num_bytes == 0 and self._failure is not None:
            raise self._failure
        return num_bytes

    def write(self, plaintext: memoryview) -> None:
        """Encrypt for :meth:`ciphertext`.

        Raises:
            TlsFailed: this end has ended the session.
        """
        try:
            while len(plaintext):
                plaintext = plaintext[self._tls.write(plaintext) :]
        except ssl.SSLError as error:
            raise _failure(error) from error

    def end(self) -> None:
        """Close this side of the session."""
        with suppress(ssl.SSLError):  # the other side has not closed yet, or the session is already broken
            self._tls.unwrap()

    def ciphertext(self, max_bytes: int = 1 << 16) -> bytes:
        """Return bytes to send over the network, at most ``max_bytes``; empty when there are none."""
        return self._outgoing.read(max_bytes)


def _failure(error: ssl.SSLError) -> TlsFailed:
    is_stranger = isinstance(error, ssl.SSLCertVerificationError)
    reason = error.reason or type(error).__name__
    return TlsFailed(reason.lower().replace("_", " "), is_stranger=is_stranger)
