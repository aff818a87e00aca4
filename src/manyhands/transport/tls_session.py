"""Mutual TLS 1.3 of one connection as a state machine without I/O.

OpenSSL comes from the ``cryptography`` package, through pyOpenSSL. It is newer than the one of many Python builds, and
it exports the secrets that bulk connections need.
"""

from __future__ import annotations

from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from OpenSSL import SSL, crypto
from OpenSSL.SSL import _ffi, _lib  # type: ignore[attr-defined]

from manyhands.base.identity import Identity, PeerId
from manyhands.transport.certificate import (
    ALPN,
    BULK_ALPN,
    issuer_certificate,
    leaf_certificate,
    peer_id_of_certificate,
)
from manyhands.transport.sealing import SECRET_BYTES, Opener, Sealer

PARTIAL_WRITE = 0x1
"""SSL_MODE_ENABLE_PARTIAL_WRITE of openssl/ssl.h, unnamed in pyOpenSSL. It is turned off, so one call encrypts all."""


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


def tls_context(identity: Identity, *, is_server: bool, alpn: str = ALPN) -> SSL.Context:
    """Create the TLS settings of one side: version 1.3 only, certificates on both sides, no session resumption.

    The remote end is identified by its peer id, so host names are not checked.

    Args:
        alpn: the protocol that a client offers; a server accepts both.
    """
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET)
    context.clear_mode(PARTIAL_WRITE)
    context.set_mode(SSL.MODE_RELEASE_BUFFERS)  # frees about 100 kB of each idle session
    context.use_privatekey(identity.private_key)
    context.use_certificate(leaf_certificate(identity))
    store = context.get_cert_store()
    assert store is not None
    store.add_cert(crypto.X509.from_cryptography(issuer_certificate()))
    context.set_verify(SSL.VERIFY_PEER | SSL.VERIFY_FAIL_IF_NO_PEER_CERT)
    if is_server:
        context.set_alpn_select_callback(_select_alpn)
    else:
        context.set_alpn_protos([alpn.encode()])
    return context


def _select_alpn(connection: SSL.Connection, offered: list[bytes]) -> Any:
    known = [alpn.encode() for alpn in (ALPN, BULK_ALPN)]
    return next((alpn for alpn in offered if alpn in known), SSL.NO_OVERLAPPING_PROTOCOLS)


class TlsSession:
    """The TLS state of one connection. Not thread-safe.

    Args:
        context: made by :func:`tls_context` for the same side.

    Attributes:
        is_sealed_now: the handshake is over, and :meth:`sealing` replaces TLS from here on.
    """

    def __init__(self, context: SSL.Context, *, is_server: bool) -> None:
        self._connection = SSL.Connection(context, None)
        self._ssl = self._connection._ssl  # noqa: SLF001
        self._failure: TlsFailed | TlsEnded | None = None
        self.is_server = is_server
        self.is_sealed_now = False
        if is_server:
            self._connection.set_accept_state()
        else:
            self._connection.set_connect_state()

    # the handshake

    def handshake(self) -> bool:
        """Continue the handshake; return whether it is over. Before and after, send the output of :meth:`ciphertext`.

        Raises:
            TlsFailed: it failed.
        """
        try:
            self._connection.do_handshake()
        except SSL.WantReadError:
            return False
        except SSL.Error as error:
            raise _failure(error) from error
        self.is_sealed_now = self.selected_alpn == BULK_ALPN
        return True

    @property
    def selected_alpn(self) -> str:
        """The protocol that both ends negotiated; empty if none."""
        return self._connection.get_alpn_proto_negotiated().decode(errors="replace")

    def remote_peer_id(self) -> PeerId | None:
        """Return the peer id in the other end's certificate, or None if it contains none."""
        try:
            certificate = self._connection.get_peer_certificate(as_cryptography=True)
        except ValueError:  # OpenSSL is less strict than the parser
            return None
        if not isinstance(certificate, x509.Certificate):
            return None
        return peer_id_of_certificate(certificate.public_bytes(serialization.Encoding.DER))

    # afterwards, on a bulk connection

    def sealing(self) -> tuple[Sealer, Opener]:
        """Return the sealer and opener of this end, keyed from the session (RFC 8446, section 7.5)."""
        is_chacha = "CHACHA20" in (self._connection.get_cipher_name() or "")
        labels = [b"EXPERIMENTAL manyhands bulk from server", b"EXPERIMENTAL manyhands bulk from client"]
        from_server, from_client = (self._connection.export_keying_material(label, SECRET_BYTES) for label in labels)
        sent, received = (from_server, from_client) if self.is_server else (from_client, from_server)
        return Sealer(sent, is_chacha=is_chacha), Opener(received, is_chacha=is_chacha)

    def rest(self) -> bytes:
        """Return the bytes that arrived after the handshake, which are not TLS."""
        parts = []
        view = memoryview(bytearray(1 << 16))
        with _ffi.from_buffer(view, require_writable=True) as start:
            while (num_bytes := _lib.BIO_read(self._connection._into_ssl, start, len(view))) > 0:  # noqa: SLF001
                parts.append(bytes(view[:num_bytes]))
        return b"".join(parts)

    # afterwards, on a control connection

    @property
    def is_over(self) -> bool:
        """Whether no more data can be read; the next :meth:`read_into` raises the reason."""
        return self._failure is not None

    def received(self, ciphertext: memoryview) -> None:
        """Add bytes received from the network."""
        self._connection.bio_write(ciphertext)

    def read_into(self, view: memoryview) -> int:
        """Decrypt received data directly into ``view``, until it is full or more ciphertext is needed.

        Returns:
            The number of bytes; 0 when more ciphertext is needed.
        Raises:
            TlsEnded: no more data will arrive.
            TlsFailed: the data was altered, or is not TLS.
        """
        if self._failure is not None:
            raise self._failure
        num_bytes = 0
        result = 1
        with _ffi.from_buffer(view, require_writable=True) as start:
            while num_bytes < len(view) and result > 0:
                result = _lib.SSL_read(self._ssl, start + num_bytes, len(view) - num_bytes)
                num_bytes += max(result, 0)
        if result <= 0 and _lib.SSL_get_error(self._ssl, result) != _lib.SSL_ERROR_WANT_READ:
            try:
                self._connection._raise_ssl_error(self._ssl, result)  # noqa: SLF001
            except SSL.ZeroReturnError:
                self._failure = TlsEnded()
            except SSL.Error as error:
                self._failure = _failure(error)
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
                plaintext = plaintext[self._connection.send(plaintext) :]
        except SSL.Error as error:
            raise _failure(error) from error

    def end(self) -> None:
        """Close this side of the session."""
        try:
            self._connection.shutdown()
        except SSL.Error:
            return  # the session is already broken

    def ciphertext(self, max_bytes: int = 1 << 16) -> bytes:
        """Return bytes to send over the network, at most ``max_bytes``; empty when there are none."""
        try:
            return self._connection.bio_read(max_bytes)
        except SSL.WantReadError:
            return b""


def _failure(error: SSL.Error) -> TlsFailed:
    reasons = [entry[-1] for entry in (error.args[0] if error.args else []) if isinstance(entry, tuple)]
    is_stranger = "certificate verify failed" in reasons
    return TlsFailed("; ".join(reasons) or type(error).__name__, is_stranger=is_stranger)
