"""TCP tunnels by ngrok (https://ngrok.com), with its package, which needs no other program.

The package reconnects by itself after an outage, but does not tell the new address of the tunnel. So a lost
session is not resumed here: :class:`manyhands.tunnels.TunnelKeeper` opens a new one.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import re
from contextlib import suppress
from typing import Any

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError, MissingExtra, Unavailable

TOKEN_VARIABLE = "NGROK_AUTHTOKEN"
TOKEN_PAGE = "https://dashboard.ngrok.com/get-started/your-authtoken"
MAX_REASON = 300

_USE_TOKEN = f"copy the token of your account from {TOKEN_PAGE} into {TOKEN_VARIABLE}"
_STOP_ANOTHER = (
    "stop another tunnel of this account (https://dashboard.ngrok.com/agents), or give the address of a tunnel of "
    "another kind with --announce"
)
_ADD_A_CARD = (
    "on the free plan ngrok opens TCP tunnels only for accounts with a payment card "
    "(https://dashboard.ngrok.com/settings#id-verification); or give the address of a tunnel of another kind with "
    "--announce"
)
ADVICE = {
    **dict.fromkeys(("105", "106", "107", "4018"), _USE_TOKEN),
    **dict.fromkeys(("108", "324"), _STOP_ANOTHER),
    "8013": _ADD_A_CARD,
}
"""Advice on an error, by its number at https://ngrok.com/docs/errors."""


class NgrokTunnel:
    """A tunnel of the ngrok account whose token is in ``NGROK_AUTHTOKEN``.

    Raises:
        MissingExtra: the package is not installed.
        ConfigError: there is no token.
    """

    name = "ngrok"

    def __init__(self) -> None:
        if importlib.util.find_spec("ngrok") is None:
            raise MissingExtra("a tunnel of ngrok", "ngrok")
        self._token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not self._token:
            raise ConfigError(f"{TOKEN_VARIABLE} is not set, and a tunnel of ngrok needs an account: {_USE_TOKEN}")
        self._session: Any = None
        self._dropped: asyncio.Future[str] | None = None

    async def open(self, target: Address) -> Address:
        ngrok = importlib.import_module("ngrok")
        loop = asyncio.get_running_loop()
        dropped: asyncio.Future[str] = loop.create_future()
        self._dropped = dropped

        def drop(reason: str) -> None:
            if not dropped.done():
                dropped.set_result(reason)

        def on_disconnection(server: str, error: str) -> None:  # on a thread of ngrok
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(drop, f"{server}: {self._readable(error)}")
            raise ConnectionError("a new session is opened instead")  # do not reconnect

        host = f"[{target.host}]" if ":" in target.host else target.host
        try:
            builder = ngrok.SessionBuilder().authtoken(self._token).client_info("manyhands", "1")
            self._session = await builder.handle_disconnection(on_disconnection).connect()
            listener = await self._session.tcp_endpoint().listen_and_forward(f"tcp://{host}:{target.port}")
        except ValueError as error:
            raise self._explained(error) from None
        return _address_of(listener.url())

    async def wait_dropped(self) -> str:
        assert self._dropped is not None, "open() comes first"
        return await asyncio.shield(self._dropped)

    async def close(self) -> None:
        session = self._session
        self._session = None
        if session is not None:
            with suppress(ValueError):  # it is closed already
                await session.close()

    def _explained(self, error: ValueError) -> ConfigError | Unavailable:
        text = ": ".join(str(part) for part in error.args)
        code = re.search(r"ERR_NGROK_(\d+)", text)
        if code is None:
            return Unavailable(
                f"ngrok cannot be reached ({self._readable(text)}); check that this machine can reach the internet"
            )
        advice = ADVICE.get(code[1], f"see https://ngrok.com/docs/errors/{code[0].lower()}")
        said = self._readable(re.sub(r"\S*err_ngrok_\d+\S*", "", text, flags=re.IGNORECASE))
        return ConfigError(f"ngrok refuses the tunnel ({code[0]}: {said}); {advice}")

    def _readable(self, text: str) -> str:
        """Return a message as one line without the token, which messages of ngrok repeat."""
        line = " ".join(text.replace(self._token, "***").split())
        return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]} ..."


def _address_of(url: str) -> Address:
    """Return the address of a tunnel, from ``tcp://HOST:PORT``."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return Address.parse(f"/dns4/{host}/tcp/{port}")
