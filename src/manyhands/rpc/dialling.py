"""Reaching a peer that has several addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from manyhands.base.address import Address
from manyhands.base.errors import DialFailed, Unavailable
from manyhands.transport.api import Stream, Transport


async def dial_first(transport: Transport, addresses: Sequence[Address], timeout_s: float) -> tuple[Stream, Address]:
    """Dial all addresses at once; the first that answers is kept, the others are closed before a word is said.

    Raises:
        DialFailed: the only address failed.
        Unavailable: all of several addresses failed; it names each with its reason.
    """
    loop = asyncio.get_running_loop()
    dials = {loop.create_task(transport.dial(address, timeout_s)): address for address in addresses}
    pending = set(dials)
    failures: list[DialFailed] = []
    try:
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for dial in done:
                if (error := dial.exception()) is None:
                    return dial.result(), dials.pop(dial)
                if not isinstance(error, DialFailed):
                    raise error
                failures.append(error)
    finally:
        await _drop(list(dials))
    if len(failures) == 1:
        raise failures[0]
    raise Unavailable("no address answers: " + "; ".join(str(failure) for failure in failures))


async def _drop(dials: Sequence[asyncio.Task[Stream]]) -> None:
    for dial in dials:
        dial.cancel()
    for result in await asyncio.gather(*dials, return_exceptions=True):
        if not isinstance(result, BaseException):
            result.abort()
