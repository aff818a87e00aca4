"""A machine with several interfaces, whose address changes; in a network namespace of its own. Needs Linux and root."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys

import pytest

from manyhands.base.address import Address
from manyhands.base.identity import Identity
from manyhands.rpc import Endpoint, endpoint
from manyhands.transport import TlsTransport

UNSHARE = ("unshare", "--net", "--mount")


def has_namespaces() -> bool:
    """Whether this process may make a network namespace."""
    is_there = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    return bool(is_there) and subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode == 0


INTERFACES = """
set -e
mount -t sysfs none /sys
ip link set lo up
ip link add docker9 type bridge
ip addr add 172.17.0.1/16 dev docker9
ip link set docker9 up
ip link add eth8 type veth peer name eth9
ip link set eth8 up
ip link set eth9 up
ip addr add 198.51.100.5/24 dev eth9
ip addr add 203.0.113.5/24 dev eth8
ip route add default dev eth8
exec "$@"
"""

MOVE = """
ip addr del 203.0.113.5/24 dev eth8
ip addr add 203.0.113.77/24 dev eth8
ip route replace default dev eth8
"""


async def tell_addresses() -> None:
    """Print the hosts that a peer announces, before one changes, and once another peer has been told."""
    endpoint.LOOK_PERIOD_S = 0.05
    moving, other = Endpoint(TlsTransport(Identity.generate())), Endpoint(TlsTransport(Identity.generate()))
    await moving.listen([Address.parse("0.0.0.0:0")])
    await other.listen([Address.parse("127.0.0.1:0")])
    await moving.connect(other.addresses[0])
    print(*(address.host for address in moving.addresses))
    await asyncio.to_thread(subprocess.run, ["sh", "-ec", MOVE], check=True)
    while "203.0.113.77" not in {one.host for one in other.addresses_to_tell(moving.peer_id)}:
        await asyncio.sleep(0.01)
    while moving.addresses[0].host != "203.0.113.77":  # it may have looked before the default route had moved
        await asyncio.sleep(0.01)
    print(*(address.host for address in moving.addresses))
    await moving.close()
    await other.close()


@pytest.mark.skipif(not has_namespaces(), reason="no namespaces here")
def test_all_interfaces_are_announced_and_an_address_that_changes_is_announced_anew() -> None:
    within = [*UNSHARE, "sh", "-c", INTERFACES, "sh", sys.executable, __file__]
    output = subprocess.run(within, check=False, capture_output=True, text=True, timeout=60)
    assert output.stdout.splitlines() == [
        "203.0.113.5 198.51.100.5 127.0.0.1",
        "203.0.113.77 198.51.100.5 127.0.0.1",
    ], output.stderr


TEMPORARY = """
set -e
ip link set lo up
ip link add eth8 type veth peer name eth9
echo 2 > /proc/sys/net/ipv6/conf/eth8/use_tempaddr
ip link set eth9 up
ip link set eth8 up
ip addr add 192.168.7.2/24 dev eth8
ip -6 addr add 2a01:4f8:0:1::2/64 dev eth8 mngtmpaddr nodad
ip -6 route add default dev eth8
while ! ip -6 addr show dev eth8 temporary | grep -q inet6 || ip -6 addr show dev eth8 | grep -q tentative; do
    sleep 0.1
done
exec "$@"
"""

HOSTS = """
import manyhands
from manyhands.base.address import Address
from manyhands.transport import tcp
with manyhands.Peer() as peer:
    print(*(Address.parse(text).host for text in peer.addresses))
print(tcp.public_ip6() not in ("", "2a01:4f8:0:1::2"))
"""


@pytest.mark.skipif(not has_namespaces(), reason="no namespaces here")
def test_of_ipv6_the_address_that_stays_is_announced_and_not_the_temporary_one_that_connects() -> None:
    within = [*UNSHARE, "sh", "-c", TEMPORARY, "sh", sys.executable, "-c", HOSTS]
    output = subprocess.run(within, check=False, capture_output=True, text=True, timeout=60)
    assert output.stdout.splitlines() == ["192.168.7.2 2a01:4f8:0:1::2", "True"], output.stderr


DISABLED = """
set -e
ip link set lo up
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
exec "$@"
"""

JOINED = """
import logging, manyhands
logging.basicConfig(level=logging.INFO)
with manyhands.Peer() as peer, manyhands.Peer(peer.addresses, client_mode=True) as other:
    print(other.dht.num_known_peers, *peer.addresses)
"""


@pytest.mark.skipif(not has_namespaces(), reason="no namespaces here")
def test_on_a_machine_whose_ipv6_is_turned_off_a_peer_has_ipv4_without_a_word() -> None:
    within = [*UNSHARE, "sh", "-c", DISABLED, "sh", sys.executable, "-c", JOINED]
    output = subprocess.run(within, check=False, capture_output=True, text=True, timeout=60)
    number, *addresses = output.stdout.split()
    assert number == "1", output.stderr
    assert all(address.startswith("/ip4/") for address in addresses)
    assert "IPv6" not in output.stderr


if __name__ == "__main__":
    asyncio.run(tell_addresses())
