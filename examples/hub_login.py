"""A run for the members of a Hugging Face organisation: the coordinator asks the Hub about each peer's token.

    manyhands run create --run-id ours --access invite
    python examples/hub_login.py ours.charter --identity ours.key --organisation my-org

Trainers join with the ticket that it prints, and with a read-only Hub token made for this purpose:

    manyhands.Peer(initial_peers=[TICKET], credential=os.environ["HF_TOKEN"])
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import urllib.error
import urllib.request
from typing import Any

import manyhands
from manyhands.access import Role, SignedCharter
from manyhands.base.address import parse_addresses
from manyhands.base.errors import Refused, Unavailable
from manyhands.base.identity import PeerId
from manyhands.base.ticket import Ticket

WHO_AM_I = "https://huggingface.co/api/whoami-v2"
TIMEOUT_S = 4.0
MAX_BYTES = 1 << 20


class HubLogin:
    """An authorizer that gives leases to the members of one organisation.

    Args:
        organisation: its name on the Hub.
        url: the Hub's endpoint that returns the owner of a token.
    """

    def __init__(self, organisation: str, url: str = WHO_AM_I) -> None:
        self._organisation = organisation
        self._url = url

    async def authorize(self, peer_id: PeerId, credential: bytes) -> Role:
        """Ask the Hub; see :class:`manyhands.access.Authorizer`."""
        token = credential.decode("ascii", "replace").strip()
        if not token or not token.isprintable() or not token.isascii():
            raise Refused(peer_id, "not_invited", "log in to the Hub, and start with Peer(..., credential=HF_TOKEN)")
        account = await asyncio.to_thread(self._ask, peer_id, token)
        organisations = {entry.get("name") for entry in account.get("orgs", ()) if isinstance(entry, dict)}
        if self._organisation not in organisations:
            raise Refused(peer_id, "not_invited", f"you are not in the organisation {self._organisation} of the Hub")
        return "trainer"

    def _ask(self, peer_id: PeerId, token: str) -> dict[str, Any]:
        request = urllib.request.Request(self._url, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                account = json.loads(answer.read(MAX_BYTES))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403):
                raise Refused(peer_id, "not_invited", "the Hub does not know this token; make a new one") from error
            raise Unavailable(f"the Hub answers with status {error.code}") from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"the Hub does not answer: {error}") from error
        if not isinstance(account, dict):
            raise Unavailable("the Hub answers with something else than an account")
        return account


def main() -> None:
    """Run the coordinator until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("charter")
    parser.add_argument("--organisation", required=True)
    parser.add_argument("--identity")
    parser.add_argument("--state-dir", default="hub-login")
    parser.add_argument("--listen", default="/ip4/0.0.0.0/tcp/31337")
    options = parser.parse_args()
    with manyhands.Peer(listen=[options.listen], identity=options.identity, state_dir=options.state_dir) as peer:
        peer.coordinate(options.charter, authorizer=HubLogin(options.organisation))
        charter = SignedCharter.load(options.charter)
        print(Ticket(charter.run_id, parse_addresses(peer.addresses), b"", charter.digest), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
