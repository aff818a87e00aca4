"""The compiled loop of the emulated network in `_star.py`: in Python it takes a whole core for 200 Mbit/s."""

from __future__ import annotations

import ctypes

import numba
import numpy as np

LONGEST_PACKET = 2048
PACKETS_AT_ONCE = 64
ROOM = 1 << 13
"""Packets in flight from one sender, or to one receiver: a quarter of a second at 400 Mbit/s."""
POLLIN = 1
CLOCK_MONOTONIC = 1

_libc = ctypes.CDLL(None)
_read, _write, _poll, _clock = _libc.read, _libc.write, _libc.poll, _libc.clock_gettime
_read.argtypes = _write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_read.restype = _write.restype = ctypes.c_ssize_t
_poll.argtypes, _poll.restype = [ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int], ctypes.c_int
_clock.argtypes, _clock.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_int


@numba.njit
def forward(fds, bytes_per_s, delay_s, loss, queue_s):  # type: ignore[no-untyped-def]
    """Forward IPv4 packets for ever; the last byte of the destination, minus 1, is the index of the receiver.

    Each packet crosses the sender's line, takes the delay, and crosses the receiver's line; lines carry
    ``bytes_per_s``, by peer. Packets that would wait longer than ``queue_s`` for a line are dropped, and so is a random
    share of all.
    """
    num = len(fds)
    np.random.seed(0)
    instant = np.zeros(2, np.int64)
    polled = np.zeros((num, 2), np.int32)  # struct pollfd: descriptor; events, with revents in the upper half
    polled[:, 0] = fds
    polled[:, 1] = POLLIN
    bytes_up = np.zeros((num, ROOM, LONGEST_PACKET), np.uint8)
    bytes_down = np.zeros((num, ROOM, LONGEST_PACKET), np.uint8)
    size_up, size_down = np.zeros((num, ROOM), np.int64), np.zeros((num, ROOM), np.int64)
    due_up, due_down = np.zeros((num, ROOM)), np.zeros((num, ROOM))
    first_up, end_up = np.zeros(num, np.int64), np.zeros(num, np.int64)
    first_down, end_down = np.zeros(num, np.int64), np.zeros(num, np.int64)
    free_up, free_down = np.zeros(num), np.zeros(num)
    while True:
        due = np.inf
        for line in range(num):
            if first_up[line] < end_up[line]:
                due = min(due, due_up[line, first_up[line] % ROOM])
            if first_down[line] < end_down[line]:
                due = min(due, due_down[line, first_down[line] % ROOM])
        _clock(CLOCK_MONOTONIC, instant.ctypes.data)
        now = instant[0] + 1e-9 * instant[1]
        wait_ms = 1000 if due > now + 1.0 else max(0, int(np.ceil(1000 * (due - now))))
        _poll(polled.ctypes.data, num, wait_ms)
        _clock(CLOCK_MONOTONIC, instant.ctypes.data)
        now = instant[0] + 1e-9 * instant[1]
        for sender in range(num):
            if polled[sender, 1] >> 16 == 0:
                continue
            for _ in range(PACKETS_AT_ONCE):
                place = end_up[sender] % ROOM
                packet = bytes_up[sender, place]
                size = _read(fds[sender], packet.ctypes.data, LONGEST_PACKET)
                if size <= 0:
                    break
                receiver = packet[19] - 1
                free = max(now, free_up[sender])
                is_known = packet[0] >> 4 == 4 and 0 <= receiver < num and receiver != sender
                if not is_known or np.random.random() < loss or free - now > queue_s:
                    continue
                if end_up[sender] - first_up[sender] == ROOM - 1:
                    continue
                free_up[sender] = free + size / bytes_per_s[sender]
                due_up[sender, place], size_up[sender, place] = free_up[sender] + delay_s, size
                end_up[sender] += 1
        while True:  # the first packet to arrive, from any sender
            sender = -1
            due = now
            for line in range(num):
                if first_up[line] < end_up[line] and due_up[line, first_up[line] % ROOM] <= due:
                    sender, due = line, due_up[line, first_up[line] % ROOM]
            if sender < 0:
                break
            place = first_up[sender] % ROOM
            first_up[sender] += 1
            size = size_up[sender, place]
            receiver = bytes_up[sender, place, 19] - 1
            free = max(due, free_down[receiver])
            if free - due > queue_s or end_down[receiver] - first_down[receiver] == ROOM:
                continue
            free_down[receiver] = free + size / bytes_per_s[receiver]
            at = end_down[receiver] % ROOM
            bytes_down[receiver, at, :size] = bytes_up[sender, place, :size]
            due_down[receiver, at], size_down[receiver, at] = free_down[receiver], size
            end_down[receiver] += 1
        for receiver in range(num):
            while first_down[receiver] < end_down[receiver]:
                place = first_down[receiver] % ROOM
                if due_down[receiver, place] > now:
                    break
                _write(fds[receiver], bytes_down[receiver, place].ctypes.data, size_down[receiver, place])
                first_down[receiver] += 1
