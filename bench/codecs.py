"""How fast compressors encode and decode, beside a copy of the same values and beside their plain path.

    python bench/codecs.py                    25 M float32 values on one core
    python bench/codecs.py --gpu              256 Mi float32 values on a GPU, beside plain PyTorch and torch.compile

Ways alternate, round by round, in buffers that are used again; the figure is the median of the rounds, with quartiles
and the share of the copy's rate. The limit is the time of reading the values once. "Encode" is everything up to the
last message, "residual" the same with the unsent part written for the next step, "feedback" the whole of
error_feedback, which adds the residual to the gradient before.
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
from torch import Tensor

from weft import kernels
from weft.compression import Bucket, Context, Piece, State
from weft.compression._coded import Coded, row
from weft.ops import Spec, Sum
from weft.strategy import Strategy
from weft.transport import loopback

WAYS = ["cast", "int8", "int8(stochastic=true)", "sign", "sign(scaled=true)", "onebit", "twobit", "terngrad"]
WAYS += ["qsgd(levels=7)", "qsgd", "topk(ratio=0.01)", "topk(ratio=0.01, sampled=true)", "powersgd(rank=4)"]
COMPILED = ("int8", "sign", "onebit", "qsgd")


def encoder(text: str, x: Tensor, spec: Spec, out: Tensor, residual: Tensor | None = None) -> Callable[[], Any]:
    """Everything up to the last collective."""
    compression: Any = Strategy.parse(text).compression
    ctx, state = Context(step=0, rank=0, workers=1), State()
    piece = Piece(spec, x, out, residual)
    loopback.run([compression.exchange(Bucket((piece,)), state, ctx)])
    rounds = len(compression.rounds([spec], 1))

    def encode() -> None:
        flow = compression.exchange(Bucket((piece,)), state, ctx)
        asked = next(flow)
        if rounds > 1:
            assert isinstance(asked, Sum)
            flow.send(asked.payload)

    return encode


def decoder(text: str, x: Tensor, spec: Spec, out: Tensor) -> Callable[[], Any] | None:
    compression: Any = Strategy.parse(text).compression
    if not isinstance(compression, Coded):
        return None
    code = torch.zeros(compression.size(x.numel(), row(spec)), dtype=torch.uint8, device=x.device)
    compression.encode(x, code, row(spec), 1, None)
    return lambda: compression.decode(code, out, row(spec), True)


def compiled(text: str, x: Tensor, spec: Spec) -> Callable[[], Any]:
    """The plain encoder, through torch.compile; with PyTorch's random numbers, as it cannot compile ours."""
    compression: Any = Strategy.parse(text).compression
    code = torch.zeros(compression.size(x.numel(), row(spec)), dtype=torch.uint8, device=x.device)
    quick = torch.compile(compression.encode)

    def encode() -> None:
        with mock.patch.object(kernels, "uniform", rand):
            quick(x, code, row(spec), 1, None)

    return plain(encode)


def plain(act: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with mock.patch.object(kernels, "of", none):
            act()

    return run


def none(tensor: Tensor) -> None:
    """No fast functions; one and the same object, which torch.compile asks for."""


def rand(count: int, key: int, device: torch.device) -> Tensor:
    return torch.rand(count, device=device)


def timed(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, in rounds that alternate; the first two are left out."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name, act in ways.items():
            times[name].append(seconds(act))
    return {name: each[2:] for name, each in times.items()}


def seconds(act: Callable[[], Any]) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        act()
        return time.perf_counter() - began
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # so that a kernel does not wait for the next one's launch
    before.record()
    act()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--columns", type=int)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--plain", action="store_true", help="the plain paths too, which take long on a CPU")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    side = 16384 if args.gpu else 5000
    spec = Spec("weight", (args.rows or side, args.columns or side))
    device = torch.device("cuda" if args.gpu else "cpu")
    x = torch.randn(spec.numel, device=device, generator=torch.Generator(device).manual_seed(0))
    other, residual = torch.zeros_like(x), torch.zeros_like(x)
    ways: dict[str, Callable[[], Any]] = {"copy": lambda: other.copy_(x), "read (the limit)": x.sum}
    for text in args.ways:
        ways[f"{text}, encode"] = encoder(text, x, spec, other)
        if Strategy.parse(text).compression.approximates:
            ways[f"{text}, encode, residual"] = encoder(text, x, spec, other, residual)
            ways[f"{text}, feedback"] = encoder(f"error_feedback({text})", x, spec, other)
        opened = decoder(text, x, spec, other)
        if opened is not None:
            ways[f"{text}, add up"] = opened
        if args.plain or args.gpu:
            ways[f"{text}, encode, plain PyTorch"] = plain(encoder(text, x, spec, other))
        if args.gpu and text in COMPILED:
            ways[f"{text}, encode, torch.compile"] = compiled(text, x, spec)
            try:
                ways[f"{text}, encode, torch.compile"]()
            except Exception as error:  # whatever Inductor raises
                print(f"torch.compile cannot compile {text}: {str(error)[:200]}")
                del ways[f"{text}, encode, torch.compile"]
    found = timed(ways, args.rounds)
    copied = statistics.median(found["copy"])
    where = torch.cuda.get_device_name() if args.gpu else "one core"
    print(f"{spec.numel / 1e6:.0f} M float32 values, {where}, {args.rounds} rounds")
    print("| | ms | quartiles | of a copy's rate |")
    print("|---|---|---|---|")
    digits = 3 if args.gpu else 1
    for name, times in found.items():
        low, middle, high = (1e3 * each for each in statistics.quantiles(times, n=4))
        print(f"| {name} | {middle:.{digits}f} | {low:.{digits}f} to {high:.{digits}f} | {1e3 * copied / middle:.2f} |")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.exit(main())
