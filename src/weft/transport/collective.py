"""The real interpreter for exchanges that take everyone: flows performed by c10d (Gloo on CPU, NCCL on CUDA).

A process carries one or several logical workers. The flows of its workers go in lockstep: each states the same
intent, the process performs it once. `direct` and `ring` have native forms here (a test holds them equal to their
lowered flows); any other topology is lowered to messages and carried as it is.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import PeerLost
from weft.ops import All, Collective, Flow, Payload, Place, Recv, Round, Scatter, Send, Sum, nbytes
from weft.topology import Topology
from weft.topology._parts import bounds
from weft.topology.direct import Direct, add_wide, forest, wide
from weft.topology.ring import Ring

Works = list[Any]
Wire = Generator[Works, None, Any]
"""Yields the c10d works that it has issued; resumed when they are done; returns one result per carried worker."""


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

    def __init__(self, topology: Topology, layout: Layout, *, staged: bool = False) -> None:
        self.topology, self.layout = topology, layout
        self.staged = staged  # Gloo carries CPU memory only; tensors elsewhere go through it
        self.connected = dist.is_initialized()
        self.sent_bytes = 0.0
        self.scratch: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}

    # --- flows ------------------------------------------------------------------------------------------------------

    def stages(self, rounds: Sequence[Round]) -> int:
        """How many turns on the wire these rounds take."""
        two = isinstance(self.topology, Direct)
        return sum(2 if two and each.op is Sum else 1 for each in rounds)

    def drive(self, flows: Sequence[Flow[Any]], tag: int) -> Wire:
        """Run one flow per carried worker to its end; returns what each returned."""
        results: list[Any] = [None] * len(flows)
        while True:
            ops = []
            done = []
            for flow, result in zip(flows, results, strict=True):
                try:
                    ops.append(flow.send(result))
                except StopIteration as stop:
                    done.append(stop.value)
            if done:
                assert not ops, "carried workers must go in lockstep"
                return done
            results = yield from self.perform(ops, tag)

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
            yield [dist.all_reduce(home, async_op=True)]
            return home
        total = yield from self._lowered(Sum(home), tag)
        return home.copy_(total)

    def _sum_direct(self, nodes: dict[tuple[int, int], Tensor], home: Tensor, tag: int) -> Wire:
        """Reduce-scatter by messages with sums in tree order at the owner, then all-gather by messages."""
        layout, me, n = self.layout, self.layout.process, self.layout.processes
        flat = home.view(-1)
        cuts = bounds(flat.numel(), n)
        mine = slice(*cuts[me])
        arrived = {key: node.view(-1)[mine] for key, node in nodes.items()}
        sends: list[tuple[int, Tensor]] = []
        recvs: list[tuple[int, Tensor]] = []
        size = cuts[me][1] - cuts[me][0]
        for k in range(1, n):
            to, source = (me + k) % n, (me - k) % n
            sends += [(to, node.view(-1)[slice(*cuts[to])]) for node in nodes.values()]
            ranks = layout.carried(source)
            for key in forest(0, layout.workers, ranks.start, ranks.stop):
                dtype = wide(home.dtype) if key[1] - key[0] > 1 else home.dtype  # a leaf is not a sum
                room = self._room(tag, layout.workers * size, dtype, home.device)
                arrived[key] = room[key[0] * size : (key[0] + 1) * size]
                recvs.append((source, arrived[key]))
        yield self._post(sends, recvs, tag)
        flat[mine] = add_wide(arrived, 0, layout.workers)
        others = [(me + k) % n for k in range(1, n)]
        yield self._post(
            [(to, flat[mine]) for to in others], [(to, flat[slice(*cuts[to])]) for to in reversed(others)], tag
        )
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
        rows = {me: torch.cat([pack(op.parts[to]) for to in ranks for op in ops])}
        sends, recvs = [], []
        for p in range(layout.processes):
            if p != me:
                sends.append((p, torch.cat([pack(op.parts[to]) for to in layout.carried(p) for op in ops])))
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
                    got[i].append(unpack(rows[p][at : at + nbytes(like)], like))
                    at += nbytes(like)
        return got

    def _lowered(self, op: Collective, tag: int) -> Wire:
        """Any topology, carried message by message between processes."""
        place = Place(workers=self.layout.processes)
        flow = self.topology.lower(op, self.layout.process, place)
        result: Any = None
        kept: Works = []
        try:
            while True:
                step = flow.send(result)
                if isinstance(step, Send):
                    kept += self._post([(step.to, part.contiguous()) for part in step.payload], [], tag)
                    result = None
                else:
                    assert isinstance(step, Recv)
                    result = tuple(torch.empty_like(part) for part in step.like)
                    wait(self._post([], [(step.source, part) for part in result], tag))
        except StopIteration as stop:
            yield kept
            return stop.value

    def _post(self, sends: list[tuple[int, Tensor]], recvs: list[tuple[int, Tensor]], tag: int) -> Works:
        """Issue messages, receives first: Gloo's links carry one way at a time where a send comes before its receive.

        Empty messages are left out on both sides.
        """
        ops = [dist.P2POp(dist.irecv, part, source, tag=tag) for source, part in recvs if part.numel()]
        ops += [dist.P2POp(dist.isend, part, to, tag=tag) for to, part in sends if part.numel()]
        self.sent_bytes += sum(nbytes((part,)) for _, part in sends)
        if not ops:
            return []
        try:
            return list(dist.batch_isend_irecv(ops))
        except RuntimeError as error:
            raise _lost(error) from error

    def _room(self, tag: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what arrives, kept from step to step."""
        key = (tag, numel, dtype, device)
        if key not in self.scratch:
            self.scratch[key] = torch.empty(numel, dtype=dtype, device=device)
        return self.scratch[key]

    # --- agreements, outside of steps -------------------------------------------------------------------------------

    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Everyone gets process 0's values, in place."""
        if not self.connected or not tensors:
            return
        payload = tuple(tensor.detach() for tensor in tensors)
        packed = pack(payload)
        packed = packed.cpu() if self.staged else packed
        wait([dist.broadcast(packed, 0, async_op=True)])
        if self.layout.process != 0:
            for tensor, value in zip(payload, unpack(packed, payload), strict=True):
                tensor.copy_(value)

    def tell(self, values: Sequence[int]) -> list[list[int]]:
        """Everyone's numbers, by process: the same count from each."""
        if not self.connected:
            return [list(values)]
        on = "cuda" if dist.get_backend() == "nccl" else "cpu"
        mine = torch.tensor(list(values), dtype=torch.int64, device=on)
        rows = [torch.empty_like(mine) for _ in range(self.layout.processes)]
        wait([dist.all_gather(rows, mine, async_op=True)])
        return [row.tolist() for row in rows]


def wait(works: Works) -> None:
    """Until all are done; a peer that went away is named as such."""
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise _lost(error) from error


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
