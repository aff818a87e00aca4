"""An HTTP server for a folder of shards. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from pathlib import Path

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.data.dataset import INDEX
from manyhands.recipes.albert.data.fetching import files_of, read_index
from manyhands.transport.admission import source_of

logger = logging.getLogger(__name__)

ALL_INTERFACES = ("::", "0.0.0.0")
MAX_ANSWERS = 256
MAX_ANSWERS_PER_ADDRESS = 64
"""Most files that are sent at once, in all and to one address, or one /64 of IPv6: above that a trainer is told to try
again, and does. A trainer fetches one file at a time; many may share the address of their router."""


class _CountedResponse(web.FileResponse):
    """A file that counts as being sent to an address until it is sent."""

    def __init__(self, path: Path, num_answers: Counter[str]) -> None:
        super().__init__(path)
        self._num_answers = num_answers

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send the file."""
        address = _source_of(request)
        self._num_answers[address] += 1
        try:
            return await super().prepare(request)
        finally:
            self._num_answers[address] -= 1
            if not self._num_answers[address]:
                del self._num_answers[address]


def application(folder: Path) -> web.Application:
    """A web application that serves the index and the files in it, whole or in ranges, and nothing else.

    Raises:
        ConfigError: the folder has no shards, or one of them is missing.
    """
    try:
        index = read_index((folder / INDEX).read_bytes())
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{folder / INDEX} cannot be served ({reason}); name the folder that manyhands data prepare --shards 8 "
            "made, for example data/shards"
        ) from error
    names = [INDEX, *(shard.name for shard in files_of(index))]
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is missing; manyhands data verify {folder} checks all files")

    num_answers: Counter[str] = Counter()

    async def send(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in names:
            raise web.HTTPNotFound
        part = request.headers.get("Range")
        address = _source_of(request)
        if sum(num_answers.values()) >= MAX_ANSWERS or num_answers[address] >= MAX_ANSWERS_PER_ADDRESS:
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "10"})
        logger.info("%s fetches %s%s", request.remote, name, f" ({part})" if part else "")
        return _CountedResponse(folder / name, num_answers)

    served = web.Application()
    served.router.add_get("/{name}", send)
    return served


def serve(folder: Path, listen: str) -> None:
    """Serve until Ctrl-C.

    Raises:
        ConfigError: the folder has no shards, or the port cannot be used.
    """
    served = application(folder)
    address = Address.parse_listen(listen)
    family = socket.AF_INET6 if address.protocol.endswith("6") else socket.AF_INET
    is_for_all = address.host == "::" and socket.has_dualstack_ipv6()
    try:
        sock = socket.create_server((address.host, address.port), family=family, dualstack_ipv6=is_for_all)
    except OSError as error:
        raise ConfigError(
            f"--listen {listen}: {error.strerror or error}; name another port, for example 0.0.0.0:8001"
        ) from error
    with sock:
        host = _own_host() if address.host in ALL_INTERFACES else address.host
        port = sock.getsockname()[1]
        logger.info("Serving %s", folder)
        logger.info("Trainers fetch it with: --dataset-url http://%s:%d/%s", _quoted(host), port, INDEX)
        loop = asyncio.new_event_loop()
        web.run_app(served, sock=sock, print=None, access_log=None, handle_signals=False, loop=loop, shutdown_timeout=1)


def _source_of(request: web.BaseRequest) -> str:
    return source_of(request.remote) if request.remote else ""


def _own_host() -> str:
    """The address of this machine in its network. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _quoted(host: str) -> str:
    return f"[{host}]" if ":" in host else host
