"""The interpreter that runs collectives between processes: by c10d, and by messages of the mesh on CPU.

A process carries one or several logical workers. The flows of its workers run in lockstep: each yields the same
intent, and the process performs it once. A topology with a native sum (`Topology.native`) uses that, and a test
compares it with the lowered flow; any other topology is lowered to messages. Between GPUs NCCL carries the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import PeerLost
from weft.ops import All, Collective, Payload, Place, Recv, Scatter, Send, Sum, nbytes
from weft.topology import CollectiveTopology, Topology
from weft.topology._parts import bounds
from weft.topology.direct import add_into, add_wide, forest, wide
from weft.transport.layout import Layout
from weft.transport.mesh import Mesh
from weft.transport.parcel import Parcel
from weft.transport.payloads import pack, unpack
from weft.transport.tensor_bytes import raw


class Works(Protocol):
    """Operations that were issued together."""

    @property
    def at_once(self) -> bool:
        """Whether `wait` does not block the thread: later work on the same CUDA stream waits by itself."""

    def wait(self) -> None: ...
    def then(self, act: Callable[[], None]) -> None: ...


Message = Tensor | memoryview
Wire = Generator[Works, None, Any]
"""Yields the operations that it has issued, is resumed when they are done, returns a result for each carried worker."""


@dataclass(frozen=True)
class Library:
    """Works of c10d."""

    works: Sequence[Any]
    at_once: bool = False
    watched: Parcel | None = None
    """Done with the last work, or failed when a peer falls silent, which c10d would notice much later."""

    def wait(self) -> None:
        """Block until all works are done. Raises PeerLost where c10d fails or a peer falls silent."""
        if self.watched is not None:
            self.watched.wait()
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise _lost(error) from error

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` when the last work is done: collectives of one group complete in their order."""
        if self.watched is not None:
            self.watched.then(act)
        else:
            self.works[-1].get_future().add_done_callback(lambda _: act())


class Processes:
    """This process among its peers: performs collectives and small agreements, and counts the bytes that it sends."""

    def __init__(self, topology: Topology, layout: Layout, *, staged: bool = False, mesh: Mesh | None = None) -> None:
        self.topology, self.layout = topology, layout
        self.staged = staged  # Gloo carries CPU memory only; tensors of other devices are copied through it
        self.connected = dist.is_initialized()
        self.nccl = self.connected and dist.get_backend() == "nccl"
        self.talk = mesh  # agreements use the host, so that they do not wait for a GPU
        self.mesh = None if self.nccl else mesh
        self._agree: Callable[[Sequence[int]], list[list[int]]] | None = None
        """Performs agreements where there are servers and no process group."""
        self.sent_bytes = 0.0
        self.scratch: dict[Any, tuple[Tensor, Message]] = {}

    # --- collectives ------------------------------------------------------------------------------------------------

    def perform(self, ops: Sequence[Any], tag: int) -> Wire:
        """One collective, yielded by every carried worker; returns one result for each, in their order."""
        match ops[0]:
            case Sum():
                total = yield from self._sum([op.payload for op in ops], tag)
                return [total if op.payload is total else op.payload.copy_(total) for op in ops]
            case All():
                gathered = yield from self._all([op.payload for op in ops], tag)
                return [gathered] * len(ops)
            case Scatter():
                return (yield from self._scatter(ops, tag))
        raise AssertionError(f"not a collective: {ops[0]}")

    def _sum(self, payloads: list[Tensor], tag: int) -> Wire:
        home = payloads[-1]
        if self.staged and home.device.type != "cpu":
            total = yield from self._sum([payload.cpu() for payload in payloads], tag)
            return home.copy_(total)
        layout, ranks = self.layout, self.layout.carried()
        if self.topology.native == "direct":
            local = {(r, r + 1): payload for r, payload in zip(ranks, payloads, strict=True)}
            nodes = {(lo, hi): add_wide(local, lo, hi) for lo, hi in forest(0, layout.workers, ranks.start, ranks.stop)}
            if not self.connected:
                return home.copy_(nodes[0, layout.workers])
            return (yield from self._sum_direct(nodes, home, tag))
        for payload in payloads[:-1]:
            home += payload
        if not self.connected:
            return home
        assert isinstance(self.topology, CollectiveTopology)
        if self.topology.native == "all_reduce":
            self.sent_bytes += self.topology.wire_bytes(Sum, nbytes((home,)), layout.processes)
            work: Any = dist.all_reduce(home, async_op=True)
            watched = self.mesh.watch(work.get_future()) if self.mesh is not None else None
            yield Library([work], at_once=self.nccl, watched=watched)
            return home
        total = yield from self._lowered(Sum(home), tag)
        return home.copy_(total)

    def _sum_direct(self, nodes: dict[tuple[int, int], Tensor], home: Tensor, tag: int) -> Wire:
        """Reduce-scatter by messages with sums in tree order at the owner, then all-gather by messages."""
        layout, me, n = self.layout, self.layout.process, self.layout.processes
        flat = home.view(-1)
        cuts = bounds(flat.numel(), n)
        mine = slice(*cuts[me])
        size = cuts[me][1] - cuts[me][0]
        others = [(me + k) % n for k in range(1, n)]
        parts = [self._pieces(node.view(-1), cuts) for node in nodes.values()]
        arrived = {key: node.view(-1)[mine] for key, node in nodes.items()}
        recvs = []
        for source in reversed(others):
            ranks = layout.carried(source)
            for key in forest(0, layout.workers, ranks.start, ranks.stop):
                dtype = wide(home.dtype) if key[1] - key[0] > 1 else home.dtype  # a leaf is not a sum
                arrived[key], scratch = self._scratch_for((tag, key[0], size, dtype, home.device))
                recvs.append((source, scratch))
        yield self._post([(to, part[to]) for to in others for part in parts], recvs, tag)
        add_into(flat[mine], arrived, 0, layout.workers)
        whole = self._pieces(flat, cuts)
        yield self._post([(to, whole[me]) for to in others], [(to, whole[to]) for to in reversed(others)], tag)
        return home

    def _all(self, payloads: list[Payload], tag: int) -> Wire:
        """The payloads of all workers, packed into bytes so that one message carries a tuple of any dtypes."""
        layout, first = self.layout, payloads[0]
        packed = torch.cat([pack(payload) for payload in payloads])
        if self.staged:
            packed = packed.cpu()
        gathered = [packed]
        if self.connected:
            size = nbytes(first)
            likes = [packed.new_empty(len(layout.carried(p)) * size) for p in range(layout.processes)]
            if self.topology.native or len({like.numel() for like in likes}) > 1:
                gathered = yield from self._all_direct(packed, likes, tag)
            else:
                gathered = [part for (part,) in (yield from self._lowered(All((packed,)), tag))]
        whole = torch.cat(gathered).to(first[0].device).view(layout.workers, -1)
        return [unpack(row, first) for row in whole]

    def _all_direct(self, packed: Tensor, likes: list[Tensor], tag: int) -> Wire:
        me = self.layout.process
        others = [p for p in range(self.layout.processes) if p != me]
        yield self._post([(p, packed) for p in others], [(p, likes[p]) for p in others], tag)
        likes[me] = packed
        return likes

    def _scatter(self, ops: Sequence[Scatter], tag: int) -> Wire:
        """One message for each pair of processes; parts for a worker of the same process stay in memory."""
        layout, ranks, me = self.layout, self.layout.carried(), self.layout.process
        likes = [op.parts[rank] for op, rank in zip(ops, ranks, strict=True)]  # as others send them
        rows = {me: self._home(torch.cat([pack(op.parts[to]) for to in ranks for op in ops]))}
        sends, recvs = [], []
        for p in range(layout.processes):
            if p != me:
                packed = torch.cat([pack(op.parts[to]) for to in layout.carried(p) for op in ops])
                sends.append((p, self._home(packed)))
                size = len(layout.carried(p)) * sum(nbytes(like) for like in likes)
                rows[p] = torch.empty(size, dtype=torch.uint8, device=rows[me].device)
                recvs.append((p, rows[p]))
        if sends:
            yield self._post(sends, recvs, tag)
        got: list[list[Payload]] = [[] for _ in ranks]
        for p in range(layout.processes):
            at = 0
            for i, like in enumerate(likes):
                for _ in layout.carried(p):
                    row = rows[p][at : at + nbytes(like)].to(like[0].device)
                    got[i].append(unpack(row, like))
                    at += nbytes(like)
        return got

    def _home(self, packed: Tensor) -> Tensor:
        """A packed payload on the device that messages are sent from."""
        return packed.cpu() if self.staged else packed

    def _lowered(self, op: Collective, tag: int) -> Wire:
        """A collective of any topology, performed as the messages that it is lowered to."""
        place = Place(workers=self.layout.processes)
        assert isinstance(self.topology, CollectiveTopology)
        flow = self.topology.lower(op, self.layout.process, place)
        result: Any = None
        kept: list[Works] = []
        try:
            while True:
                step = flow.send(result)
                if isinstance(step, Send):
                    kept.append(self._post([(step.to, part.contiguous()) for part in step.payload], [], tag))
                    result = None
                else:
                    assert isinstance(step, Recv)
                    result = tuple(torch.empty_like(part) for part in step.like)
                    yield self._post([], [(step.source, part) for part in result], tag)
        except StopIteration as stop:
            yield from kept
            return stop.value

    def _post(self, sends: Sequence[tuple[int, Message]], recvs: Sequence[tuple[int, Message]], tag: int) -> Works:
        """Issue messages; both sides leave out empty ones."""
        sends = [(to, part) for to, part in sends if _size(part)]
        recvs = [(source, part) for source, part in recvs if _size(part)]
        self.sent_bytes += sum(_size(part) for _, part in sends)
        if self.mesh is not None:
            return self.mesh.post([(to, raw(p)) for to, p in sends], [(source, raw(p)) for source, p in recvs], tag)
        ops = [dist.P2POp(dist.irecv, part, source, tag=tag) for source, part in recvs]  # type: ignore[arg-type]
        ops += [dist.P2POp(dist.isend, part, to, tag=tag) for to, part in sends]  # type: ignore[arg-type]
        try:
            return Library(dist.batch_isend_irecv(ops) if ops else [], at_once=True)
        except RuntimeError as error:
            raise _lost(error) from error

    def _pieces(self, flat: Tensor, cuts: Sequence[tuple[int, int]]) -> list[Message]:
        """Ranges of a tensor as messages: as memoryviews for the mesh, which are cheaper to make than tensors."""
        if self.mesh is None:
            return [flat[a:b] for a, b in cuts]
        memory, width = raw(flat), flat.element_size()
        return [memory[a * width : b * width] for a, b in cuts]

    def _scratch_for(self, key: tuple[int, int, int, torch.dtype, torch.device]) -> tuple[Tensor, Message]:
        """Memory for parts that arrive, reused in every step."""
        if key not in self.scratch:
            _, _, numel, dtype, device = key
            scratch = torch.empty(numel, dtype=dtype, device=device)
            self.scratch[key] = scratch, self._pieces(scratch, [(0, numel)])[0]
        return self.scratch[key]

    # --- agreements, outside of steps -------------------------------------------------------------------------------

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast the values of process 0 to all processes, in place."""
        if not self.connected or not tensors:
            return
        payload = tuple(tensor.detach() for tensor in tensors)
        packed = pack(payload)
        packed = packed.cpu() if self.staged else packed
        if self.mesh is None:
            Library([dist.broadcast(packed, 0, async_op=True)]).wait()
        else:
            self._relay(packed)
        if self.layout.process != 0:
            for tensor, value in zip(payload, unpack(packed, payload), strict=True):
                tensor.copy_(value)

    def _relay(self, packed: Tensor) -> None:
        """A pipelined broadcast from process to process, in pieces, so that all links are busy at once."""
        assert self.mesh is not None
        me, last = self.layout.process, self.layout.processes - 1
        sent = []
        for piece in packed.split(_RELAY_BYTES):
            if me > 0:
                self.mesh.post([], [(me - 1, raw(piece))], _AGREEMENT).wait()
            if me < last:
                sent.append(self.mesh.post([(me + 1, raw(piece))], [], _AGREEMENT))
        for parcel in sent:
            parcel.wait()

    def agree_through(self, tell: Callable[[Sequence[int]], list[list[int]]]) -> None:
        """Let servers carry agreements from here on, where workers have no process group."""
        self._agree = tell

    @property
    def agrees(self) -> bool:
        """Whether `tell` reaches the other processes."""
        return self.talk is not None or self._agree is not None or self.layout.processes == 1

    def tell(self, values: Sequence[int]) -> list[list[int]]:
        """All-gather a list of integers, of the same length in every process; returns one list for each process."""
        if self._agree is not None:
            return self._agree(values)
        if self.talk is None or not values:
            return [list(values) for _ in range(self.layout.processes)]
        return _tell(self.talk, self.layout, values, _AGREEMENT).heard()

    def tell_tensor(self, values: Tensor) -> list[Tensor]:
        """The same for a flat tensor of 64-bit integers."""
        if self.talk is None or not values.numel():
            return [torch.tensor(row, dtype=torch.int64) for row in self.tell(values.tolist())]
        return _gathered(self.talk, self.layout, values, _AGREEMENT)()

    def tell_later(self, values: Callable[[], Sequence[int]]) -> Telling:
        """`tell` beside the exchange of a step: returns at once, and the result waits."""
        mine = values()
        return Telling(lambda: [list(mine)]) if self.talk is None else _tell(self.talk, self.layout, mine, _STATUS)


@dataclass(frozen=True)
class Telling:
    """An all-gather of integers that was issued."""

    heard: Callable[[], list[list[int]]]
    """Waits, then returns the list of each process."""


def _tell(mesh: Mesh, layout: Layout, values: Sequence[int], tag: int) -> Telling:
    heard = _gathered(mesh, layout, torch.tensor(list(values), dtype=torch.int64), tag)
    return Telling(lambda: [row.tolist() for row in heard()])


def _gathered(mesh: Mesh, layout: Layout, mine: Tensor, tag: int) -> Callable[[], list[Tensor]]:
    """Start an all-gather; the result waits for it."""
    rows = [mine if p == layout.process else torch.empty_like(mine) for p in range(layout.processes)]
    others = [p for p in range(layout.processes) if p != layout.process]
    parcel = mesh.post([(p, raw(mine)) for p in others], [(p, raw(rows[p])) for p in others], tag)

    def heard() -> list[Tensor]:
        parcel.wait()
        return rows

    return heard


_AGREEMENT = 2**63
"""The tag of agreements; buckets have lower ones."""
_STATUS = _AGREEMENT + 1
_RELAY_BYTES = 2**20


def _size(part: Message) -> int:
    return len(part) if isinstance(part, memoryview) else nbytes((part,))


def _lost(error: RuntimeError) -> PeerLost:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return PeerLost(f"an exchange with the other workers broke off: {reason}")
