"""Requests and replies between processes, and between nobody else: what servers are asked over.

    server = Server(("10.0.0.1", 0), key, handle)            handle(request): request.reply(...), from any thread
    client = Client(server.address, key, "worker 3")
    client.ask(PUSH, [gradient], once=True).wait(timeout_s)

A request that counts is served once: it has a number, askers say it again over a new link where the old one broke, and
servers know what they have answered. So an acknowledged request was served exactly once, and one whose asker died at
most once. All waits are bounded; a peer that says nothing for `patience_s` is given up, and idle links say that they
are there.

Read `meeting` for how strangers are kept out, `frames` for what is on the wire, `links` for who moves the bytes.
"""

from weft.transport.messaging.client import Client, Pending, Refused
from weft.transport.messaging.frames import Kind
from weft.transport.messaging.handshake import Stranger
from weft.transport.messaging.keys import Key
from weft.transport.messaging.server import Request, Server

__all__ = ["Client", "Key", "Kind", "Pending", "Refused", "Request", "Server", "Stranger"]
