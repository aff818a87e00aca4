"""Keys, peer ids and signatures."""

import errno
import os
import stat
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hypothesis import given
from hypothesis import strategies as st

from manyhands.base.errors import BadSignature, ConfigError
from manyhands.base.identity import Identity, PeerId, peer_id_from_public_key, public_key_of, verify

# The Ed25519 test vector of the libp2p specification "Peer Ids and Keys".
SPEC_SEED = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
SPEC_PUBLIC_KEY = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
SPEC_PEER_ID = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"

ALICE = Identity.from_seed(bytes(32))
BOB = Identity.from_seed(bytes([1]) * 32)


def pem(key: object, password: bytes | None = None) -> bytes:
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def test_the_peer_id_equals_that_of_the_libp2p_test_vector() -> None:
    identity = Identity.from_seed(SPEC_SEED)
    assert identity.private_key.public_key().public_bytes_raw() == SPEC_PUBLIC_KEY
    assert identity.peer_id == peer_id_from_public_key(SPEC_PUBLIC_KEY) == SPEC_PEER_ID
    assert base58.b58decode(SPEC_PEER_ID) == bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20]) + SPEC_PUBLIC_KEY


@given(st.binary(min_size=32, max_size=32))
def test_peer_id_and_public_key_are_one_to_one(public_key: bytes) -> None:
    peer_id = peer_id_from_public_key(public_key)
    assert len(peer_id) == 52
    assert peer_id.startswith("12D3KooW")
    assert public_key_of(peer_id).public_bytes_raw() == public_key


@pytest.mark.parametrize(
    "peer_id",
    [
        "",
        "12D3KooW",
        SPEC_PEER_ID[:-1],
        SPEC_PEER_ID + "1",
        SPEC_PEER_ID + " ",  # a second spelling of one peer would make it two
        SPEC_PEER_ID + "\n",
        SPEC_PEER_ID.replace("B", "0"),  # no base58 digit
        SPEC_PEER_ID.replace("B", "é"),
        "1" * 52,
        "1" * 100_000,
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # the libp2p form of an RSA key
        "16Uiu2HAmLhLvBoYaoZfaMUKuibM6ac163GwKY74c5kiSLg5KvLpY",  # secp256k1
    ],
)
def test_malformed_peer_ids_are_refused(peer_id: str) -> None:
    with pytest.raises(ConfigError, match="a peer id has 52 characters and begins with 12D3KooW") as caught:
        public_key_of(PeerId(peer_id))
    assert len(str(caught.value)) < 300


@given(st.text(max_size=70))
def test_no_text_makes_anything_but_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        public_key_of(PeerId(text))


def test_repr_does_not_show_the_secret() -> None:
    assert repr(ALICE) == f"Identity({ALICE.peer_id})"


def test_two_generated_identities_differ() -> None:
    assert Identity.generate().peer_id != Identity.generate().peer_id


def test_load_or_create_makes_a_private_file_and_reads_it_again(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "identity.pem"
    created = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(str(path)).peer_id == created.peer_id


# A private key in PEM whose algorithm (OID 1.2.3.4) nobody knows.
UNKNOWN_ALGORITHM = b"-----BEGIN PRIVATE KEY-----\nMA4CAQAwBQYDKgMEBAIEAA==\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    "content",
    [
        b"hello",
        bytes(range(256)),
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        pem(ALICE.private_key)[:80],
        pem(ALICE.private_key, password=b"secret"),
        ALICE.private_key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
        UNKNOWN_ALGORITHM,
    ],
    ids=["text", "binary", "garbage in PEM", "cut off", "encrypted", "public key", "unknown algorithm"],
)
def test_a_file_that_holds_no_key_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(content)
    with pytest.raises(
        ConfigError, match="not an unencrypted PEM private key; name a file that does not exist"
    ) as caught:
        Identity.load_or_create(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_an_empty_file_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"identity.pem is empty: .* restore it from a copy, or delete it") as caught:
        Identity.load_or_create(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", is_full)
        with pytest.raises(ConfigError, match="No space left on device"):
            Identity.load_or_create(tmp_path / "identity.pem")
    assert not list(tmp_path.iterdir())
    Identity.load_or_create(tmp_path / "identity.pem")


@pytest.mark.skipif(os.name != "posix", reason="other systems have other rights")
@pytest.mark.parametrize("mode", [0o666, 0o644, 0o640])
def test_an_identity_file_that_others_can_read_is_made_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    path = tmp_path / "identity.pem"
    created = Identity.load_or_create(path)
    path.chmod(mode)
    assert Identity.load_or_create(path).peer_id == created.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert f"was open to other users of this machine (mode {mode:o})" in caplog.text
    assert "a run's owner: move the key and the charter away" in caplog.text
    caplog.clear()
    Identity.load_or_create(path)
    assert not caplog.records


def test_a_file_that_is_no_key_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ours.charter"
    path.write_text("manyhands-charter-1 xyz\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="is not an unencrypted PEM private key"):
        Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert not caplog.records


def test_an_identity_file_that_others_can_write_is_refused_if_it_cannot_be_made_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "identity.pem"
    Identity.load_or_create(path)

    def refused(path: Path, mode: int) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    path.chmod(0o644)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", refused)
        Identity.load_or_create(path)
        assert "can act as this peer" in caplog.text
    path.chmod(0o666)
    monkeypatch.setattr(Path, "chmod", refused)
    with pytest.raises(ConfigError, match=r"can be written by other users .*\(mode 666\).* chmod 600"):
        Identity.load_or_create(path)


def test_a_file_that_holds_another_kind_of_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(pem(rsa.generate_private_key(public_exponent=65537, key_size=2048)))
    with pytest.raises(ConfigError, match="holds RSAPrivateKey; an Ed25519 key is needed"):
        Identity.load_or_create(path)


def test_identity_paths_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"identity file .*: Is a directory"):
        Identity.load_or_create(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="identity file"):
        Identity.load_or_create(tmp_path / "file" / "identity.pem")


@given(st.text(max_size=20), st.binary(max_size=100))
def test_a_signature_verifies(domain: str, message: bytes) -> None:
    signature = ALICE.sign(domain, message)
    assert len(signature) == 64
    verify(ALICE.peer_id, domain, message, signature)


SIGNATURE = ALICE.sign("record", b"message")


@pytest.mark.parametrize(
    ("peer_id", "domain", "message", "signature"),
    [
        (BOB.peer_id, "record", b"message", SIGNATURE),
        (ALICE.peer_id, "manifest", b"message", SIGNATURE),
        (ALICE.peer_id, "record", b"massage", SIGNATURE),
        (ALICE.peer_id, "record", b"message", SIGNATURE[:-1] + bytes([SIGNATURE[-1] ^ 1])),
        (ALICE.peer_id, "record", b"message", b""),
        (ALICE.peer_id, "recordm", b"essage", SIGNATURE),  # a domain's end is not up to the message
        ("nobody", "record", b"message", SIGNATURE),
    ],
    ids=["another peer", "another domain", "another message", "flipped bit", "empty", "shifted domain", "no peer id"],
)
def test_any_difference_is_a_bad_signature(peer_id: str, domain: str, message: bytes, signature: bytes) -> None:
    with pytest.raises(BadSignature, match=f"peer {peer_id}: the signature does not match") as caught:
        verify(PeerId(peer_id), domain, message, signature)
    assert caught.value.peer_id == peer_id


def test_a_signature_is_worthless_outside_manyhands() -> None:
    """The key also signs TLS handshakes: a prefix of our own keeps either from passing for the other."""
    signed = b"manyhands/1 " + len(b"record").to_bytes(2, "big") + b"record" + b"message"
    ALICE.private_key.public_key().verify(SIGNATURE, signed)
