"""The example of a login service, against a Hub that is faked at its HTTP interface."""

from __future__ import annotations

import http.server
import importlib.util
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manyhands.base.errors import ConfigError, Unavailable
from tests.unit.access.world import CHARTER, RUN, new_world

EXAMPLE = Path(__file__).parents[3] / "examples" / "hub_login.py"
ACCOUNTS: dict[str, tuple[int, Any]] = {
    "Bearer hf_member": (200, {"name": "ada", "orgs": [{"name": "my-org"}, {"name": "other"}]}),
    "Bearer hf_outsider": (200, {"name": "eve", "orgs": [{"name": "other"}]}),
    "Bearer hf_strange": (200, ["no account"]),
    "Bearer hf_down": (503, {}),
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Says whose token it is, as the Hub does."""

    def do_GET(self) -> None:
        assert self.path == "/api/whoami-v2"
        status, account = ACCOUNTS.get(self.headers["Authorization"], (401, {"error": "Invalid credentials"}))
        body = json.dumps(account).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/api/whoami-v2"
        server.shutdown()
        thread.join()


def login_of(url: str) -> Any:
    spec = importlib.util.spec_from_file_location("hub_login", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.HubLogin("my-org", url)


async def test_a_member_of_the_organisation_gets_a_lease(hub: str) -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER, login_of(hub))
        peer = await world.peer(10)
        await peer.join_run(world.ticket(), b"hf_member")
        lease = peer.members[RUN].lease_of(peer.peer_id)
        assert lease is not None
        assert lease.role == "trainer"


@pytest.mark.parametrize(
    ("credential", "error", "message"),
    [
        (b"hf_outsider", ConfigError, "you are not in the organisation my-org of the Hub"),
        (b"hf_mistyped", ConfigError, "the Hub does not know this token; make a new one"),
        (b"", ConfigError, "log in to the Hub"),
        (b"two\nlines", ConfigError, "log in to the Hub"),
        (b"hf_down", Unavailable, "the Hub answers with status 503"),
        (b"hf_strange", Unavailable, "something else than an account"),
    ],
)
async def test_accounts_outside_the_organisation_get_no_lease(
    hub: str, credential: bytes, error: type[Exception], message: str
) -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER, login_of(hub))
        with pytest.raises(error, match=message):
            await (await world.peer(10)).join_run(world.ticket(), credential)


async def test_a_hub_that_is_down_raises_unavailable() -> None:
    async with new_world() as world:
        await (await world.peer(2)).serve_charter(CHARTER, login_of("http://127.0.0.1:9/api/whoami-v2"))
        with pytest.raises(Unavailable, match="the Hub does not answer"):
            await (await world.peer(10)).join_run(world.ticket(), b"hf_member")
