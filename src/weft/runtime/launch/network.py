"""The network between the machines of a run: whether it is trusted, and the addresses of this machine on it."""

from __future__ import annotations

import fcntl
import socket
import struct
import typing

from weft.environment import Network
from weft.errors import UserError


def parse_network(text: str) -> Network:
    """The value of --network."""
    if text not in (known := typing.get_args(Network)):
        raise UserError(f"--network is '{text}', but must be {' or '.join(known)}")
    return typing.cast(Network, text)


def check_network(host: str) -> None:
    """Refuse to connect to another host, unless the user trusts the network in between."""
    if not is_loopback(host):
        raise UserError(
            f"gradients would go to {host} and back unencrypted, and the network is not known to be trusted; if it is, "
            "pass --network trusted, or set WEFT_NETWORK=trusted under another launcher"
        )


def is_loopback(host: str) -> bool:
    """Whether a name resolves to loopback addresses only."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)} if host else {host}
    except OSError:
        found = {host}
    return all(address == "::1" or address.startswith("127.") for address in found)


def address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])


def address_towards(host: str) -> str | None:
    """The address from which this machine reaches a host."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """The network interface from which this machine reaches a host; None if it cannot be determined."""
    mine = address_towards(host)
    if mine is None:
        return None
    try:
        return next((name for _, name in socket.if_nameindex() if address_of(name) == mine), None)
    except OSError:
        return None
