"""A parameter server: a share of the model, its optimizer, and answers to workers over messages.

    JOIN    worker; replies its step, and        it takes part from here on
            whether there is a model
    SET     worker, part; values                 what the model starts from, by worker 0
    PUSH    worker, part, step; what it said     one part's gradient of the step under way, compressed
    COMMIT  worker, share; hyper-parameters      the step's gradients are all there; replies whether they were accepted
    PULL    worker; replies version, model       answered once the worker may start its next step
    LEAVE   worker                               it has all it needs, and nobody waits for it any more

Pushes, commits, joins and leaves count once, however often links break. One thread serves; the messages' own thread
only hands requests over.
"""

from __future__ import annotations

import enum
import inspect
import json
import logging
import queue
import struct
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.compression import Compressor, Context, Piece
from weft.ops import Spec
from weft.runtime.holder import Contribution, Holder
from weft.runtime.pushing import heard
from weft.synchrony import Synchrony
from weft.transport.mesh import raw
from weft.transport.messaging import Key, Request, Server

log = logging.getLogger(__name__)


class Verb(enum.IntEnum):
    """What workers ask of servers."""

    JOIN = 1
    PUSH = 2
    COMMIT = 3
    PULL = 4
    LEAVE = 5
    SET = 6


WHO = struct.Struct("!I")
PART = struct.Struct("!IIQ")
COMMIT = struct.Struct("!Id")
VERSION = struct.Struct("!Q")
JOINED = struct.Struct("!Q?")

Hyper = list[dict[str, float | list[float]]]
"""An optimizer's numbers, group by group."""


@dataclass(frozen=True)
class Loss:
    """A worker that went away."""

    name: str
    reason: str


class ParameterServer:
    """Serves one share of a model until closed.

    `parts` are flat tensors that `optimizer` steps, in place; `specs` say what each is to a compressor.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: Key,
        *,
        synchrony: Synchrony,
        compression: Compressor,
        specs: Sequence[Spec],
        parts: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        workers: int,
        seed: int = 0,
        encrypted: bool = False,
        patience_s: float = 3.0,
        lost: Callable[[Loss], None] = lambda loss: None,
    ) -> None:
        self.compression, self.specs, self.seed = compression, specs, seed
        self.parts, self.optimizer, self._lost = parts, optimizer, lost
        self.holder = Holder(synchrony, parts, workers, self._update, updated=self._updated)
        self.staleness: Counter[tuple[int, int]] = Counter()
        """How many contributions of each worker became part of an update so many updates late."""
        self._grads = [[torch.zeros_like(part) for part in parts] for _ in range(workers)]
        self._pushed: list[set[int]] = [set() for _ in range(workers)]
        self._waiting: dict[int, Request] = {}
        self._snapshot: tuple[int, memoryview] | None = None
        self._names: dict[str, int] = {}
        self._came: set[int] = set()
        self._set: set[int] = set()
        self.over = threading.Event()
        """Set when every worker has been here, and has left again."""
        self._inbox: queue.SimpleQueue[Request | Loss | None] = queue.SimpleQueue()
        most = max((part.numel() * part.element_size() for part in parts), default=0) + (1 << 20)
        self._server = Server(
            address,
            key,
            self._inbox.put,
            encrypted=encrypted,
            most_bytes=most,
            patience_s=patience_s,
            left=lambda name, why: self._inbox.put(Loss(name, why)),
        )
        self.address = self._server.address
        self._thread = threading.Thread(target=self._serve, name="weft-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._inbox.put(None)
        self._thread.join(timeout=5)
        self._server.close()

    # --- in the serving thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (request := self._inbox.get()) is not None:
            if isinstance(request, Loss):
                self._leave(request)
                continue
            try:
                self._do(request)
            except Exception as error:  # whatever was asked, others are served
                log.warning("a request of %s could not be served: %s", request.sender, error)
                with suppress(RuntimeError):  # it may have been answered before
                    request.refuse(f"that cannot be served: {error}")

    def _do(self, request: Request) -> None:
        match request.verb:
            case Verb.PUSH:
                worker, part, step = PART.unpack(request.parts[0])
                self._back(worker)
                self._hear(worker, part, step, request.parts[1:])
                request.reply()
            case Verb.COMMIT:
                worker, share = COMMIT.unpack(request.parts[0])
                self._back(worker)
                accepted = self._commit(worker, share, json.loads(bytes(request.parts[1])))
                request.reply([memoryview(bytes([accepted]))])
                self._answer_pulls()
            case Verb.PULL:
                (worker,) = WHO.unpack(request.parts[0])
                self._back(worker)
                self._give_up_waiting(worker)
                self._waiting[worker] = request
                self._answer_pulls()
            case Verb.JOIN:
                (worker,) = WHO.unpack(request.parts[0])
                if not 0 <= worker < self.holder.workers:
                    raise ValueError(f"there is no worker {worker}")
                self._names[request.sender] = worker
                self._pushed[worker] = set()
                self._came.add(worker)
                self.holder.join(worker)
                self.holder.reads[worker] = -1
                request.reply([memoryview(JOINED.pack(self.holder.clocks[worker], self._started))])
            case Verb.SET:
                worker, part, _ = PART.unpack(request.parts[0])
                if self._started:
                    raise ValueError("the model was set already")
                self.parts[part].detach().copy_(torch.frombuffer(request.parts[1], dtype=self.parts[part].dtype))
                self._set.add(part)
                request.reply()
                self._answer_pulls()
            case Verb.LEAVE:
                (worker,) = WHO.unpack(request.parts[0])
                self._back(worker)
                self.holder.leave(worker)
                self._names.pop(request.sender, None)
                request.reply()
                self._answer_pulls()
                if len(self._came) == self.holder.workers == len(self.holder.gone):
                    self.over.set()
            case _:
                request.refuse(f"a parameter server knows no request {request.verb}")

    def _back(self, worker: int) -> None:
        if not 0 <= worker < self.holder.workers:
            raise ValueError(f"there is no worker {worker}")
        if worker in self.holder.gone:
            self.holder.join(worker)

    def _hear(self, worker: int, part: int, step: int, words: Sequence[memoryview]) -> None:
        out = self._grads[worker][part]
        if self.compression.lossless:
            (data,) = words
            out.copy_(torch.frombuffer(data, dtype=out.dtype))
        else:
            piece = Piece(self.specs[part], torch.zeros_like(out), out)
            heard(self.compression, words, piece, Context(step=step, rank=worker, workers=1, seed=self.seed))
        self._pushed[worker].add(part)

    def _commit(self, worker: int, share: float, hyper: Hyper) -> bool:
        missing = len(self.parts) - len(self._pushed[worker])
        if missing:
            raise ValueError(f"worker {worker} has not pushed {missing} of {len(self.parts)} parts")
        self._pushed[worker] = set()
        for group, values in zip(self.optimizer.param_groups, hyper, strict=True):
            known = {name: value for name, value in values.items() if name in group}
            group.update({name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})
        grads = [grad.clone() for grad in self._grads[worker]]
        return self.holder.contribute(Contribution(worker, share, grads))

    def _update(self, grads: Sequence[Tensor]) -> None:
        for part, grad in zip(self.parts, grads, strict=True):
            part.grad = grad
        self.optimizer.step()

    def _updated(self, worker: int, staleness: int) -> None:
        self.staleness[worker, staleness] += 1

    @property
    def _started(self) -> bool:
        """Whether the model has been given the values that it starts from."""
        return len(self._set) == len(self.parts)

    def _answer_pulls(self) -> None:
        """Whoever may go on gets the model; all of one version get the same copy of it."""
        if not self._started:
            return
        for worker in [worker for worker in self._waiting if self.holder.may_start(worker)]:
            request = self._waiting.pop(worker)
            version = self.holder.read(worker)
            if self._snapshot is None or self._snapshot[0] != version:
                self._snapshot = version, raw(torch.cat([part.detach().view(torch.uint8) for part in self.parts]))
            request.reply([memoryview(VERSION.pack(version)), self._snapshot[1]])

    def _give_up_waiting(self, worker: int) -> None:
        """Whoever asks again is answered anew."""
        if worker in self._waiting:
            self._waiting.pop(worker).refuse("it was asked for anew, or its worker went away")

    def _leave(self, loss: Loss) -> None:
        """A worker is gone, and nobody waits for it; should it come back, it takes part again by what it asks."""
        worker = self._names.get(loss.name)
        if worker is None:
            return
        self._give_up_waiting(worker)
        if not self.holder.synchrony.everyone:  # else the run stops, and nothing is made of what is there
            self.holder.leave(worker)
        self._lost(loss)
        self._answer_pulls()


def shard_optimizer(
    optimizer: torch.optim.Optimizer, parts: Mapping[Tensor, Sequence[Tensor]]
) -> torch.optim.Optimizer:
    """An optimizer of the same kind, with the same options, for parts of the parameters: which parts of which."""
    groups = []
    for group in optimizer.param_groups:
        own = [part for param in group["params"] for part in parts.get(param, ())]
        groups.append({name: value for name, value in group.items() if name != "params"} | {"params": own})
    takes = inspect.signature(type(optimizer).__init__).parameters
    return type(optimizer)(groups, **{name: value for name, value in optimizer.defaults.items() if name in takes})


def hyper(optimizer: torch.optim.Optimizer) -> Hyper:
    """The numbers of each group, which a schedule may change from step to step."""
    found: Hyper = []
    for group in optimizer.param_groups:
        numbers: dict[str, float | list[float]] = {}
        for name, value in group.items():
            if isinstance(value, tuple) and all(isinstance(each, float) for each in value):
                numbers[name] = list(value)  # AdamW's betas
            elif isinstance(value, float):
                numbers[name] = value
        found.append(numbers)
    return found
