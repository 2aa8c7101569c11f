"""How fast compressors encode and decode, beside a copy of the same values and beside their plain path.

    python bench/codecs.py                    25 M float32 values on one core

Ways alternate, round by round, in buffers that are used again; the figure is the median of the rounds, with quartiles
and the share of the copy's rate. The limit is the time of reading the values once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from weft import kernels
from weft.compression import Bucket, Context, Piece
from weft.compression._coded import Coded, row
from weft.ops import Spec
from weft.strategy import Strategy

WAYS = ["cast", "int8", "int8(stochastic=true)", "sign", "onebit", "twobit", "terngrad", "qsgd(levels=7)", "qsgd"]
WAYS += ["topk(ratio=0.01)", "topk(ratio=0.01, sampled=true)", "powersgd(rank=4)"]


def encoder(text: str, x: torch.Tensor, spec: Spec, owed: torch.Tensor | None) -> Callable[[], Any]:
    """Everything up to the first collective."""
    compression: Any = Strategy.parse(text).compression
    ctx, state = Context(step=0, rank=0, workers=1), {}
    piece = Piece(spec, x, torch.empty_like(x), owed)
    return lambda: next(compression.exchange(Bucket((piece,)), state, ctx))


def decoder(text: str, x: torch.Tensor, spec: Spec) -> Callable[[], Any] | None:
    compression: Any = Strategy.parse(text).compression
    if not isinstance(compression, Coded):
        return None
    code, out = torch.zeros(compression.size(x.numel(), row(spec)), dtype=torch.uint8), torch.zeros_like(x)
    compression.encode(x, code, row(spec), 1, None)
    return lambda: compression.decode(code, out, row(spec), True)


def plain(act: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with mock.patch.object(kernels, "of", return_value=None):
            act()

    return run


def timed(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in rounds that alternate; the first is left out."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, act in ways.items():
            began = time.perf_counter()
            act()
            times[name].append(time.perf_counter() - began)
    return {name: each[1:] for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--columns", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--plain", action="store_true", help="the plain paths too, which take long")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = Spec("weight", (args.rows, args.columns))
    x = torch.randn(spec.numel, generator=torch.Generator().manual_seed(0))
    other, owed = torch.zeros_like(x), torch.zeros_like(x)
    ways: dict[str, Callable[[], Any]] = {"copy": lambda: other.copy_(x), "read": x.sum}
    for text in args.ways:
        ways[f"{text}, encode"] = encoder(text, x, spec, None)
        ways[f"{text}, encode, rest owed"] = encoder(text, x, spec, owed)
        opened = decoder(text, x, spec)
        if opened is not None:
            ways[f"{text}, add up"] = opened
        if args.plain:
            ways[f"{text}, encode, plain"] = plain(encoder(text, x, spec, None))
    found = timed(ways, args.rounds)
    copied = statistics.median(found["copy"])
    print(f"{spec.numel / 1e6:.0f} M float32 values, one core, {args.rounds} rounds")
    print("| | ms | quartiles | of a copy's rate |")
    print("|---|---|---|---|")
    for name, times in found.items():
        low, middle, high = (1e3 * each for each in statistics.quantiles(times, n=4))
        print(f"| {name} | {middle:.1f} | {low:.1f} to {high:.1f} | {1e3 * copied / middle:.2f} |")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
