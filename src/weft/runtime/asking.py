"""A worker's side of parameter servers: gradients out, range by range, and the model back in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.compression import Compressor, Context, Piece, State
from weft.ops import Spec
from weft.runtime.pushing import said
from weft.runtime.serving import COMMIT, JOINED, PART, VERSION, WHO, Hyper, Verb
from weft.topology._shards import Range
from weft.transport.mesh import raw
from weft.transport.messaging import Client, Pending


@dataclass(frozen=True)
class Pulled:
    """The model is on its way: one reply of each server."""

    replies: Sequence[Pending]
    versions: Sequence[bytearray]

    def wait(self, timeout_s: float) -> list[int]:
        """Until all of it is in place; returns each server's version."""
        for reply in self.replies:
            reply.wait(timeout_s)
        return [VERSION.unpack(version)[0] for version in self.versions]


class Servers:
    """All servers of a run, asked by one worker. `ranges` says, server by server, what it keeps."""

    def __init__(
        self,
        worker: int,
        clients: Sequence[Client],
        ranges: Sequence[Sequence[Range]],
        specs: Mapping[str, Spec],
        compression: Compressor,
        seed: int = 0,
    ) -> None:
        self.worker, self.clients, self.ranges, self.specs = worker, clients, ranges, specs
        self.compression, self.seed = compression, seed
        self._model: Mapping[str, Tensor] = {}
        self.state: State = {}
        """What the compressor remembers, by range."""
        self._who = memoryview(WHO.pack(worker))
        self._on_their_way: list[Pending] = []

    def join(self, model: Mapping[str, Tensor], timeout_s: float) -> int:
        """Take part; worker 0 brings the model that all start from. Returns the step to start with."""
        self._model = model
        asked = [client.ask(Verb.JOIN, [self._who], once=True) for client in self.clients]
        said = [JOINED.unpack(each.wait(timeout_s)[0]) for each in asked]
        for client, ranges, (_, started) in zip(self.clients, self.ranges, said, strict=True):
            if self.worker == 0 and not started:
                self._set(client, ranges, model, timeout_s)
        return max(int(step) for step, _ in said)

    def _set(self, client: Client, ranges: Sequence[Range], model: Mapping[str, Tensor], timeout_s: float) -> None:
        asked = []
        for number, part in enumerate(ranges):
            head, values = PART.pack(self.worker, number, 0), model[part.name][part.start : part.stop]
            asked.append(client.ask(Verb.SET, [memoryview(head), raw(values)], once=True))
        for each in asked:
            each.wait(timeout_s)

    def push(self, grads: Mapping[str, Tensor], step: int) -> None:
        """Send gradients, flat and already multiplied by this worker's share; they must not change until `commit`."""
        for client, ranges in zip(self.clients, self.ranges, strict=True):
            for number, part in enumerate(ranges):
                if part.name in grads:
                    head = memoryview(PART.pack(self.worker, number, step))
                    words = self._words(part, grads[part.name][part.start : part.stop], step)
                    self._on_their_way.append(client.ask(Verb.PUSH, [head, *map(raw, words)], once=True))

    def _words(self, part: Range, grad: Tensor, step: int) -> list[Tensor]:
        """What goes to the server: the gradient itself, or what a compressor says about it."""
        if self.compression.lossless:
            return [grad]
        ctx = Context(step=step, rank=self.worker, workers=1, seed=self.seed)
        value = self._model[part.name][part.start : part.stop]
        piece = Piece(part.spec(self.specs[part.name]), grad, torch.empty_like(grad), value=value)
        return said(self.compression, piece, self.state, ctx)

    def commit(self, share: float, hyper: Hyper, timeout_s: float) -> list[bool]:
        """The step's gradients are all there. Returns, server by server, whether they were accepted."""
        for each in self._on_their_way:
            each.wait(timeout_s)
        self._on_their_way = []
        head, numbers = memoryview(COMMIT.pack(self.worker, share)), memoryview(json.dumps(hyper).encode())
        asked = [client.ask(Verb.COMMIT, [head, numbers], once=True) for client in self.clients]
        return [bool(each.wait(timeout_s)[0][0]) for each in asked]

    def pull(self, model: Mapping[str, Tensor]) -> Pulled:
        """Ask for the model, which comes into the memory of these flat tensors once this worker may go on."""
        replies, versions = [], []
        for client, ranges in zip(self.clients, self.ranges, strict=True):
            versions.append(bytearray(VERSION.size))
            into = [memoryview(versions[-1]), *(raw(model[part.name][part.start : part.stop]) for part in ranges)]
            replies.append(client.ask(Verb.PULL, [self._who], into=into))
        return Pulled(replies, versions)

    def leave(self, timeout_s: float) -> None:
        """This worker has all it needs."""
        for asked in [client.ask(Verb.LEAVE, [self._who], once=True) for client in self.clients]:
            asked.wait(timeout_s)
        for client in self.clients:
            client.close()
