"""Mutual TLS 1.3 of one connection, without its input and output: bytes go in and out at both sides.

OpenSSL comes with the ``cryptography`` package, through pyOpenSSL. It is newer than what many Pythons were built with,
and it exports the secrets that bulk connections go on with.
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
"""SSL_MODE_ENABLE_PARTIAL_WRITE of openssl/ssl.h, for which pyOpenSSL has no name. Without it one call encrypts all."""


class TlsFailed(Exception):
    """The handshake failed, or what came is not TLS.

    Attributes:
        is_stranger: the other end has a certificate, and not one of a peer.
    """

    def __init__(self, message: str, *, is_stranger: bool = False) -> None:
        super().__init__(message)
        self.is_stranger = is_stranger


class TlsEnded(Exception):
    """The other end said that nothing more comes."""


def tls_context(identity: Identity, *, is_server: bool, alpn: str = ALPN) -> SSL.Context:
    """TLS settings of one side: version 1.3 only, a certificate of both sides, no session is resumed.

    Who answers is checked by peer id, so host names are not looked at.

    Args:
        alpn: what a client asks for; a server takes both.
    """
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET)
    context.clear_mode(PARTIAL_WRITE)
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
    """One connection's TLS. Not for two threads at once.

    Args:
        context: made by :func:`tls_context` for the same side.

    Attributes:
        is_sealed_now: the handshake is over, and what follows is not TLS but what :meth:`sealing` makes.
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
        """Go on with the handshake; whether it is over. Before and after, send what :meth:`ciphertext` gives.

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
        """The protocol that both ends agreed on; empty if none."""
        return self._connection.get_alpn_proto_negotiated().decode(errors="replace")

    def remote_peer_id(self) -> PeerId | None:
        """Whose certificate the other end has, or None when it names no peer."""
        try:
            certificate = self._connection.get_peer_certificate(as_cryptography=True)
        except ValueError:  # OpenSSL is not as strict as the parser
            return None
        if not isinstance(certificate, x509.Certificate):
            return None
        return peer_id_of_certificate(certificate.public_bytes(serialization.Encoding.DER))

    # afterwards, on a bulk connection

    def sealing(self) -> tuple[Sealer, Opener]:
        """What this end sends with and receives with from now on, keyed from the session (RFC 8446, section 7.5)."""
        is_chacha = "CHACHA20" in (self._connection.get_cipher_name() or "")
        labels = [b"EXPERIMENTAL manyhands bulk from server", b"EXPERIMENTAL manyhands bulk from client"]
        from_server, from_client = (self._connection.export_keying_material(label, SECRET_BYTES) for label in labels)
        sent, received = (from_server, from_client) if self.is_server else (from_client, from_server)
        return Sealer(sent, is_chacha=is_chacha), Opener(received, is_chacha=is_chacha)

    def rest(self) -> bytes:
        """What came behind the handshake; it is not TLS any more."""
        parts = []
        view = memoryview(bytearray(1 << 16))
        with _ffi.from_buffer(view, require_writable=True) as start:
            while (num_bytes := _lib.BIO_read(self._connection._into_ssl, start, len(view))) > 0:  # noqa: SLF001
                parts.append(bytes(view[:num_bytes]))
        return b"".join(parts)

    # afterwards, on a control connection

    @property
    def is_over(self) -> bool:
        """Whether nothing can be read any more; the next :meth:`read_into` says why."""
        return self._failure is not None

    def received(self, ciphertext: memoryview) -> None:
        """Take in what came from the network."""
        self._connection.bio_write(ciphertext)

    def read_into(self, view: memoryview) -> int:
        """Decrypt what has come straight into ``view``, until it is full or more ciphertext is needed.

        Returns:
            The number of bytes; 0 when more ciphertext is needed.
        Raises:
            TlsEnded: nothing more comes.
            TlsFailed: it was altered on its way, or is not TLS.
        """
        if self._failure is not None:
            raise self._failure
        num_bytes, result = 0, 1
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
        """Encrypt; what comes out is in :meth:`ciphertext`.

        Raises:
            TlsFailed: this end has ended the session.
        """
        try:
            while len(plaintext):
                plaintext = plaintext[self._connection.send(plaintext) :]
        except SSL.Error as error:
            raise _failure(error) from error

    def end(self) -> None:
        """Say that nothing more comes from here."""
        try:
            self._connection.shutdown()
        except SSL.Error:
            return  # the session is broken: there is nothing to end

    def ciphertext(self, max_bytes: int = 1 << 16) -> bytes:
        """What is to be sent over the network; empty when there is nothing. At most ``max_bytes`` at a time."""
        try:
            return self._connection.bio_read(max_bytes)
        except SSL.WantReadError:
            return b""


def _failure(error: SSL.Error) -> TlsFailed:
    reasons = [entry[-1] for entry in (error.args[0] if error.args else []) if isinstance(entry, tuple)]
    is_stranger = "certificate verify failed" in reasons
    return TlsFailed("; ".join(reasons) or type(error).__name__, is_stranger=is_stranger)
