"""Authenticated requests and replies between the processes of a run, over TCP.

    server = Server(("10.0.0.1", 0), key, handle)            handle(request): request.reply(...), from any thread
    client = Client(server.address, key, "worker 3")
    client.ask(PUSH, [gradient], once=True).wait(timeout_s)

A request with `once=True` is served at most once: it has a number, the client sends it again over a new link where the
old one broke, and the server remembers its replies. So an acknowledged request was served exactly once, and a request
whose client died at most once. All waits are bounded: a peer that is silent for `patience_s` is lost, and idle links
send heartbeats.

`handshake` authenticates connections, `frames` is the wire format, `links` carries the bytes, `client` and `server` are
the two sides of the protocol.
"""

from weft.transport.messaging.client import Client, Pending, Refused
from weft.transport.messaging.frames import Kind
from weft.transport.messaging.handshake import Stranger
from weft.transport.messaging.keys import Key
from weft.transport.messaging.server import Request, Server

__all__ = ["Client", "Key", "Kind", "Pending", "Refused", "Request", "Server", "Stranger"]
