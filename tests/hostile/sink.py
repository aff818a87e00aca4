"""Accepts connections at addresses where no peer is, and prints ``dial HOST PORT SOURCE`` for each.

python -m tests.hostile.sink HOST:PORT...
"""

from __future__ import annotations

import selectors
import socket
import sys


def main(*places: str) -> None:
    selector = selectors.DefaultSelector()
    for place in places:
        host, _, port = place.partition(":")
        selector.register(socket.create_server((host, int(port)), backlog=1000), selectors.EVENT_READ)
    print("listening", flush=True)
    while True:
        for key, _ in selector.select():
            listener = key.fileobj
            assert isinstance(listener, socket.socket)
            connection, source = listener.accept()
            connection.close()
            print("dial", *listener.getsockname(), source[0], flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
