"""A newcomer gets the tokenizer of its run from a peer, and believes only the one that the manifest names."""

from __future__ import annotations

import logging
import zlib
from typing import Any

import pytest

from manyhands import Peer
from manyhands.recipes.albert import tokenizer_exchange
from manyhands.recipes.albert.data.corpus import load_documents
from manyhands.recipes.albert.data.tokenizer import tokenizer_digest, tokenizer_json, train_tokenizer
from manyhands.recipes.albert.tokenizer_exchange import (
    TOKENIZER,
    TokenizerPart,
    TokenizerRequest,
    fetch_tokenizer,
    serve_tokenizer,
)

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
SENTENCES = load_documents()[:10]
OWN = train_tokenizer(SENTENCES, 700)
DIGEST = tokenizer_digest(OWN)


def fetched(newcomer: Peer, *donors: Peer, digest: str = DIGEST) -> Any:
    fetching = fetch_tokenizer(newcomer.endpoint, [donor.peer_id for donor in donors], digest)
    return newcomer.run(fetching, 20.0, "fetching")


def serve(peer: Peer, raw: bytes) -> None:
    """Hand out these bytes, whatever is asked for."""

    def on_request(remote: str, request: TokenizerRequest) -> TokenizerPart:
        return TokenizerPart(raw[request.offset : request.offset + 100_000], len(raw))

    async def handle() -> None:
        peer.endpoint.handle(TOKENIZER, on_request)

    peer.run(handle(), 5.0, "serving")


def test_a_fetched_tokenizer_makes_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_exchange, "PART_BYTES", 1000)  # several parts
    with Peer(listen=LOOPBACK) as donor, Peer(donor.addresses, client_mode=True) as newcomer:
        donor.run(serve_tokenizer(donor.endpoint, OWN), 5.0, "serving")
        tokenizer = fetched(newcomer, donor)
    assert tokenizer_digest(tokenizer) == DIGEST
    assert tokenizer(SENTENCES[0])["input_ids"] == OWN(SENTENCES[0])["input_ids"]


LIES = [
    b"not zlib",
    zlib.compress(b"not a tokenizer"),
    zlib.compress(tokenizer_json(OWN).encode())[:-9],
    zlib.compress(tokenizer_json(train_tokenizer(SENTENCES, 600)).encode()),
    zlib.compress(b"\0" * (tokenizer_exchange.MAX_JSON_BYTES + 1)),
    zlib.compress(b"\xff\xfe"),
    zlib.compress(b"[" * 100_000),
    zlib.compress(b'{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "version": "\\u001b[31m"}'),
]


@pytest.mark.parametrize("raw", LIES)
def test_a_false_tokenizer_is_not_taken_and_its_sender_is_named(raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "manyhands"),
        Peer(listen=LOOPBACK) as liar,
        Peer(liar.addresses, listen=LOOPBACK) as honest,
        Peer(liar.addresses, client_mode=True) as newcomer,
    ):
        serve(liar, raw)
        assert fetched(newcomer, liar) is None
        assert liar.peer_id in caplog.text
        honest.run(serve_tokenizer(honest.endpoint, OWN), 5.0, "serving")
        newcomer.run(newcomer.endpoint.connect(honest.endpoint.addresses[0]), 5.0, "connecting")
        assert tokenizer_digest(fetched(newcomer, liar, honest)) == DIGEST


def test_a_tokenizer_of_another_digest_is_not_handed_out(caplog: pytest.LogCaptureFixture) -> None:
    with Peer(listen=LOOPBACK) as donor, Peer(donor.addresses, client_mode=True) as newcomer:
        assert fetched(newcomer, donor) is None, "it does not serve any"
        donor.run(serve_tokenizer(donor.endpoint, OWN), 5.0, "serving")
        assert fetched(newcomer, donor, digest="another") is None
        assert fetched(newcomer) is None


def test_a_peer_does_not_ask_itself_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "manyhands"), Peer(listen=LOOPBACK) as peer:
        assert fetched(peer, peer) is None
    assert "Could not get the tokenizer" not in caplog.text
