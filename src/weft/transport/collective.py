"""The real interpreter for exchanges that take everyone: collectives by c10d, messages by our own mesh on CPU.

A process carries one or several logical workers. The flows of its workers go in lockstep: each states the same
intent, the process performs it once. `direct` and `ring` have native forms here (a test holds them equal to their
lowered flows); any other topology is lowered to messages and carried as it is. Between GPUs NCCL carries messages too.
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
from weft.topology.direct import Direct, add_into, add_wide, forest, wide
from weft.topology.ring import Ring
from weft.transport.mesh import Mesh, Parcel, raw


class Works(Protocol):
    """What was put on the wire together."""

    @property
    def at_once(self) -> bool:
        """Whether waiting holds up no thread: what follows on the same stream waits by itself."""

    def wait(self) -> None: ...
    def then(self, act: Callable[[], None]) -> None: ...


Message = Tensor | memoryview
Wire = Generator[Works, None, Any]
"""Yields what it has put on the wire; resumed when that is done; returns one result per carried worker."""


@dataclass(frozen=True)
class Library:
    """Works of the collective library."""

    works: Sequence[Any]
    at_once: bool = False
    watched: Parcel | None = None
    """Done with the last of them, or when a peer falls silent, which the library would notice much later."""

    def wait(self) -> None:
        """Until all are done; a peer that went away is named as such."""
        if self.watched is not None:
            self.watched.wait()
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise _lost(error) from error

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` when the last is done: collectives of one group end in their order."""
        if self.watched is not None:
            self.watched.then(act)
        else:
            self.works[-1].get_future().add_done_callback(lambda _: act())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which process carries which logical workers: contiguous and as even as can be."""

    workers: int
    processes: int = 1
    process: int = 0

    def carried(self, process: int | None = None) -> range:
        p = self.process if process is None else process
        return range(p * self.workers // self.processes, (p + 1) * self.workers // self.processes)


class Processes:
    """This process among its peers: performs collectives, one small agreement at a time, and counts bytes."""

    def __init__(self, topology: Topology, layout: Layout, *, staged: bool = False, mesh: Mesh | None = None) -> None:
        self.topology, self.layout = topology, layout
        self.staged = staged  # Gloo carries CPU memory only; tensors elsewhere go through it
        self.connected = dist.is_initialized()
        self.nccl = self.connected and dist.get_backend() == "nccl"
        self.talk = mesh  # agreements pass through the host, so that no GPU has to be waited for
        self.mesh = None if self.nccl else mesh
        self.teller: Callable[[Sequence[int]], list[list[int]]] | None = None
        """Who carries agreements where there are servers and no process group."""
        self.sent_bytes = 0.0
        self.scratch: dict[Any, tuple[Tensor, Message]] = {}

    # --- collectives ------------------------------------------------------------------------------------------------

    def perform(self, ops: Sequence[Any], tag: int) -> Wire:
        """One collective, stated by every carried worker; each result stands where its worker does."""
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
        if isinstance(self.topology, Direct):
            local = {(r, r + 1): payload for r, payload in zip(ranks, payloads, strict=True)}
            nodes = {(lo, hi): add_wide(local, lo, hi) for lo, hi in forest(0, layout.workers, ranks.start, ranks.stop)}
            if not self.connected:
                return home.copy_(nodes[0, layout.workers])
            return (yield from self._sum_direct(nodes, home, tag))
        for payload in payloads[:-1]:
            home += payload
        if not self.connected:
            return home
        if isinstance(self.topology, Ring):
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
                arrived[key], room = self._room((tag, key[0], size, dtype, home.device))
                recvs.append((source, room))
        yield self._post([(to, part[to]) for to in others for part in parts], recvs, tag)
        add_into(flat[mine], arrived, 0, layout.workers)
        whole = self._pieces(flat, cuts)
        yield self._post([(to, whole[me]) for to in others], [(to, whole[to]) for to in reversed(others)], tag)
        return home

    def _all(self, payloads: list[Payload], tag: int) -> Wire:
        """Everyone's payloads, packed into bytes so that one message carries a tuple of any dtypes."""
        layout, first = self.layout, payloads[0]
        packed = torch.cat([pack(payload) for payload in payloads])
        if self.staged:
            packed = packed.cpu()
        everyone = [packed]
        if self.connected:
            size = nbytes(first)
            likes = [packed.new_empty(len(layout.carried(p)) * size) for p in range(layout.processes)]
            if isinstance(self.topology, (Direct, Ring)) or len({like.numel() for like in likes}) > 1:
                everyone = yield from self._all_direct(packed, likes, tag)
            else:
                everyone = [part for (part,) in (yield from self._lowered(All((packed,)), tag))]
        whole = torch.cat(everyone).to(first[0].device).view(layout.workers, -1)
        return [unpack(row, first) for row in whole]

    def _all_direct(self, packed: Tensor, likes: list[Tensor], tag: int) -> Wire:
        me = self.layout.process
        others = [p for p in range(self.layout.processes) if p != me]
        yield self._post([(p, packed) for p in others], [(p, likes[p]) for p in others], tag)
        likes[me] = packed
        return likes

    def _scatter(self, ops: Sequence[Scatter], tag: int) -> Wire:
        """Worker to worker, one message per pair of processes; inside a process parts change hands in memory."""
        layout, ranks, me = self.layout, self.layout.carried(), self.layout.process
        likes = [op.parts[rank] for op, rank in zip(ops, ranks, strict=True)]  # what others send me is shaped alike
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
        """Where messages leave from."""
        return packed.cpu() if self.staged else packed

    def _lowered(self, op: Collective, tag: int) -> Wire:
        """Any topology, carried message by message between processes."""
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
        """Issue messages; empty ones are left out on both sides."""
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
        """Ranges of a tensor as messages; plain memory where that will do, since a tensor takes longer to make."""
        if self.mesh is None:
            return [flat[a:b] for a, b in cuts]
        memory, width = raw(flat), flat.element_size()
        return [memory[a * width : b * width] for a, b in cuts]

    def _room(self, key: tuple[int, int, int, torch.dtype, torch.device]) -> tuple[Tensor, Message]:
        """Memory for what arrives, kept from step to step."""
        if key not in self.scratch:
            _, _, numel, dtype, device = key
            room = torch.empty(numel, dtype=dtype, device=device)
            self.scratch[key] = room, self._pieces(room, [(0, numel)])[0]
        return self.scratch[key]

    # --- agreements, outside of steps -------------------------------------------------------------------------------

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Everyone gets process 0's values, in place."""
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
        """From process to process, in pieces, so that all links are busy at once."""
        assert self.mesh is not None
        me, last = self.layout.process, self.layout.processes - 1
        sent = []
        for piece in packed.split(_RELAYED):
            if me > 0:
                self.mesh.post([], [(me - 1, raw(piece))], _AGREEMENT).wait()
            if me < last:
                sent.append(self.mesh.post([(me + 1, raw(piece))], [], _AGREEMENT))
        for parcel in sent:
            parcel.wait()

    def tell(self, values: Sequence[int]) -> list[list[int]]:
        """Everyone's numbers, by process: the same count from each."""
        if self.teller is not None:
            return self.teller(values)
        if self.talk is None or not values:
            return [list(values) for _ in range(self.layout.processes)]
        return _tell(self.talk, self.layout, values, _AGREEMENT).heard()

    def tell_later(self, values: Callable[[], Sequence[int]]) -> Telling:
        """The same beside a step's exchange: everyone's numbers when they are asked for."""
        mine = values()
        return Telling(lambda: [list(mine)]) if self.talk is None else _tell(self.talk, self.layout, mine, _STATUS)


@dataclass(frozen=True)
class Telling:
    """Numbers that are on their way."""

    heard: Callable[[], list[list[int]]]
    """Everyone's, by process; waits for them."""


def _tell(mesh: Mesh, layout: Layout, values: Sequence[int], tag: int) -> Telling:
    mine = torch.tensor(list(values), dtype=torch.int64)
    rows = [mine if p == layout.process else torch.empty_like(mine) for p in range(layout.processes)]
    others = [p for p in range(layout.processes) if p != layout.process]
    parcel = mesh.post([(p, raw(mine)) for p in others], [(p, raw(rows[p])) for p in others], tag)

    def heard() -> list[list[int]]:
        parcel.wait()
        return [row.tolist() for row in rows]

    return Telling(heard)


_AGREEMENT = 2**63
"""The tag of what is not a bucket's."""
_STATUS = _AGREEMENT + 1
_RELAYED = 2**20


# --- parts of a collective ------------------------------------------------------------------------------------------


def cut(ops: Sequence[Collective], part: int, parts: int) -> list[Collective]:
    """One of several parts of a collective, as each carried worker states it. Payloads are cut, not what they mean."""
    if parts == 1:
        return list(ops)
    pieces: list[Collective] = []
    for op in ops:
        if isinstance(op, Sum):
            pieces.append(Sum(op.payload.view(-1).tensor_split(parts)[part]))
        else:
            assert isinstance(op, All), "what goes to each worker is not cut"
            pieces.append(All((pack(op.payload).tensor_split(parts)[part],)))
    return pieces


def joined(ops: Sequence[Collective], results: Sequence[list[Any]]) -> list[Any]:
    """The parts' results, as if the collective had been performed at once; one for each carried worker."""
    if len(results) == 1:
        return results[0]
    whole: list[Any] = []
    for worker, op in enumerate(ops):
        if isinstance(op, Sum):
            whole.append(op.payload)  # each part was added up in its place
            continue
        assert isinstance(op, All)
        rows = zip(*(part[worker] for part in results), strict=True)
        whole.append([unpack(torch.cat([piece for (piece,) in row]), op.payload) for row in rows])
    return whole


def _size(part: Message) -> int:
    return len(part) if isinstance(part, memoryview) else nbytes((part,))


def _lost(error: RuntimeError) -> PeerLost:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return PeerLost(f"an exchange with the other workers broke off: {reason}")


def pack(payload: Payload) -> Tensor:
    """A payload as bytes."""
    parts = [part.contiguous().view(-1).view(torch.uint8) for part in payload]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(row: Tensor, like: Payload) -> Payload:
    """Bytes as a payload again, shaped as `like`; copied where a dtype asks for alignment."""
    parts = []
    at = 0
    for part in like:
        size = nbytes((part,))
        chunk = row[at : at + size]
        if chunk.storage_offset() % part.element_size():
            chunk = chunk.clone()
        parts.append(chunk.view(part.dtype).view(part.shape))
        at += size
    return tuple(parts)
