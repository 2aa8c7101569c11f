"""Reductions of a loop's own figures over all processes: `run.mean`, `run.sum` and `run.gather`.

All processes call them in the same order. The calls are compared before their values are used: a process that calls
another one, or evaluates other data, gets an error instead of a wrong figure.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.errors import LoopError, PeerLost, UserError
from weft.transport.collective import Processes

Figure = float | int | Tensor


class Reductions:
    """Exchanges figures between the processes of a run."""

    def __init__(self, transport: Processes) -> None:
        self.transport = transport
        self.fingerprint = 0
        """Of the data that the process has evaluated since the last reduction."""

    def seen(self, fingerprint: int) -> None:
        """A batch of an evaluation, of any worker."""
        self.fingerprint = (self.fingerprint * 31 + fingerprint) % 2**62

    def sum(self, figures: Mapping[str, Figure]) -> dict[str, Any]:
        """The sum of each figure."""
        rows = self._exchanged("sum", list(figures), [_double(each) for each in figures.values()])
        return {name: _as_given(_added(column)) for name, column in zip(figures, zip(*rows, strict=True), strict=True)}

    def mean(self, figures: Mapping[str, Figure], weight: Figure) -> dict[str, Any]:
        """The mean of each figure over processes; one with weight 0 does not count."""
        mine = float(weight)
        if not (math.isfinite(mine) and mine >= 0):
            raise UserError(f"run.mean(weight={mine}): give this process's number of samples, 0 or more")
        doubles = {name: _double(each) for name, each in figures.items()}
        sums = self.sum(
            {n: each * mine if mine else torch.zeros_like(each) for n, each in doubles.items()} | {"": mine}
        )
        total = sums.pop("")
        if not total:
            raise LoopError("run.mean() got weight 0 from every process; evaluate at least one sample")
        return {name: each / total for name, each in sums.items()}

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, joined along their first dimension."""
        if not tensor.dim():
            raise UserError("run.gather() joins tensors along their first dimension; give it tensor.unsqueeze(0)")
        given = tensor.detach().cpu().contiguous()
        packed = _padded(given.reshape(-1).view(torch.uint8))
        kind = f"{given.dtype} {tuple(given.shape[1:])}"
        sizes = self._told("gather", [kind], [given.shape[0]])
        most = -(-max(row[0] for row in sizes) * _row_bytes(given) // 8)
        mine = torch.zeros(most, dtype=torch.int64)
        mine[: packed.numel()] = packed
        parts = []
        for (rows,), held in zip(sizes, self.transport.tell_tensor(mine), strict=True):
            flat = held.view(torch.uint8)[: rows * _row_bytes(given)]
            parts.append(flat.clone().view(given.dtype).view(rows, *given.shape[1:]))
        return torch.cat(parts).to(tensor.device)

    def _exchanged(self, what: str, names: list[str], figures: list[Tensor]) -> list[list[Tensor]]:
        """Every process's figures in float64, bit for bit."""
        shapes = [f"{name} {tuple(each.shape)}" for name, each in zip(names, figures, strict=True)]
        flat = torch.cat([each.reshape(-1) for each in figures]) if figures else torch.zeros(0, dtype=torch.float64)
        rows = self._told(what, shapes, flat.view(torch.int64).tolist())
        sizes = [each.numel() for each in figures]
        values = [torch.tensor(row, dtype=torch.int64).view(torch.float64).split(sizes) for row in rows]
        return [[part.view(like.shape) for part, like in zip(row, figures, strict=True)] for row in values]

    def _told(self, what: str, shapes: list[str], values: list[int]) -> list[list[int]]:
        """Exchange integers, after a head that shows whether all processes make the same call."""
        layout, transport = self.transport.layout, self.transport
        if layout.processes > 1 and not transport.agrees:
            raise UserError(
                "processes that share no exchange cannot reduce figures; call run.distribute() first, and use another "
                "topology than shared_memory"
            )
        call = zlib.crc32(f"{what} {shapes}".encode())
        heads = transport.tell([layout.process, call, self.fingerprint, len(values)])
        self.fingerprint = 0
        for process, head in enumerate(heads):
            if head[0] != process:
                raise PeerLost(f"worker {process} was lost, so its part of run.{what}() is missing")
        if len({tuple(head[1:2]) for head in heads}) > 1:
            raise LoopError(
                f"the processes make different calls at run.{what}(): other names, shapes or another function; let "
                "every process reach the same reductions in the same order, outside of `if run.is_main`"
            )
        if len({head[2] for head in heads}) > 1:
            raise LoopError(
                f"the processes evaluated different data before run.{what}(); build the loader alike in every process, "
                "and loop over all of run.evaluate(loader)"
            )
        return transport.tell(values)


def _double(figure: Figure) -> Tensor:
    return torch.as_tensor(figure, dtype=torch.float64, device="cpu").detach()


def _added(column: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(column).sum(0)


def _as_given(total: Tensor) -> Any:
    return total.item() if not total.dim() else total


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _padded(flat: Tensor) -> Tensor:
    """Bytes as 64-bit integers."""
    whole = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8)
    whole[: flat.numel()] = flat
    return whole.view(torch.int64)
