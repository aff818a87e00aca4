"""An HTTP server for a folder of shards. Imports no torch."""

from __future__ import annotations

import logging
import os
import re
import socket
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Route

from manyhands.base.address import Address
from manyhands.base.errors import ConfigError
from manyhands.recipes.albert.data.dataset import INDEX
from manyhands.recipes.albert.data.fetching import files_of, read_index
from manyhands.transport.http_connections import bounded_server

logger = logging.getLogger(__name__)

RANGE = re.compile(r"bytes=\d{0,15}-\d{0,15}")
ALL_INTERFACES = ("::", "0.0.0.0")


def application(folder: Path) -> Starlette:
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

    async def send(request: Request) -> FileResponse:
        name = request.path_params["name"]
        if name not in names:
            raise HTTPException(404)
        host = request.client.host if request.client is not None else "somebody"
        part = RANGE.fullmatch(request.headers.get("Range", ""))  # nothing else of a stranger comes into the log
        if not os.access(folder / name, os.R_OK):
            logger.warning("%s asks for %s, which is gone or cannot be read", host, name)
            raise HTTPException(404)
        logger.info("%s fetches %s%s", host, name, f" ({part[0]})" if part else "")
        return FileResponse(folder / name)

    return Starlette(routes=[Route("/{name}", send)])


def serve(folder: Path, listen: str) -> None:
    """Serve until Ctrl-C.

    Raises:
        ConfigError: the folder has no shards, or the port cannot be used.
        KeyboardInterrupt: at the end.
    """
    server = bounded_server(application(folder))
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
        server.run(sockets=[sock])


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
