"""Whatever arrives in the place of a payload, a decoder refuses it or makes a gradient of it, and writes nowhere else.

Every compressor of the catalogue, alone and wrapped, as a server hears a push and as a worker hears its peers. Frames
are honest ones, damaged, or garbage; compressor and seed name each. `FUZZ_FRAMES` says how many in all; a million
by `make soak`, with kernels that AddressSanitizer and UBSan watch.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pure.laws.test_compression import compressors, draw, lossy, specs_of, tapped, value_of
from weft.compression import Bucket, Compressor, Context, Piece, _coded
from weft.compression.error_feedback import ErrorFeedback
from weft.errors import PayloadError
from weft.ops import All, Op, Payload, Scatter, Spec, Sum, nbytes
from weft.runtime.server.compressed_push import decode_push, encode_push
from weft.transport import loopback
from weft.transport.payloads import pack, unpack
from weft.transport.tensor_bytes import raw

FRAMES = int(os.environ.get("FUZZ_FRAMES", "6000"))
EVERY = list(dict.fromkeys([*compressors.args[1], *(ErrorFeedback(inner=inner) for inner in lossy)]))
SHAPES = ((1,), (100,), (11, 13), (2, 3, 4), (64, 8), (257,), (0,), ())
BUCKETS = (((100,),), ((7,), (30, 5)), ((60, 40), (7,), (31, 50), (2, 3, 4)))
MARK = 7.0
GAP = 32
WORDS = (0, 1, 99, 100, 101, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF)
"""Counts and places at an edge; infinities, NaN and the largest number."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors are not worth several."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)


every = pytest.mark.parametrize("compression", EVERY, ids=str)


def frames(paths: int = 2) -> range:
    return range(max(4, FRAMES // (paths * len(EVERY))))


def damaged(data: bytes, dice: random.Random) -> bytes:
    """As many bytes: flipped, overwritten, or all anew."""
    if not data:
        return data
    whole = bytearray(data)
    match dice.randrange(4):
        case 0:
            return dice.randbytes(len(data))
        case 1:
            for _ in range(dice.randint(1, 8)):
                whole[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        case 2:
            start = dice.randrange(len(whole))
            whole[start:] = bytes(len(whole) - start)
        case _:
            for _ in range(dice.randint(1, 4)):
                at = dice.randrange(0, len(whole), 4)
                whole[at : at + 4] = dice.choice(WORDS).to_bytes(4, "little")[: len(whole) - at]
    return bytes(whole)


def resized(words: list[bytes], dice: random.Random) -> list[bytes]:
    """Other sizes, or another number of parts."""
    at = dice.randrange(len(words)) if words else 0
    match dice.randrange(5):
        case 0 if words:
            words[at] = words[at][: dice.randint(0, len(words[at]))]
        case 1 if words:
            words[at] += dice.randbytes(dice.randint(1, 40))
        case 2 if words:
            del words[at]
        case 3 if words:
            words[at] = dice.randbytes(dice.randint(0, 2 * len(words[at]) + 8))
        case _:
            words.insert(at, dice.randbytes(dice.randint(0, 40)))
    return words


class Room:
    """Memory of one parameter, which lies between marks, or ends where its allocation does."""

    def __init__(self, like: Tensor, *, marked: bool) -> None:
        gap = GAP if marked else 0
        self.whole = torch.full((like.numel() + 2 * gap,), MARK, dtype=like.dtype)
        self.inside = self.whole[gap : gap + like.numel()].copy_(like)
        self.outside = [self.whole[:gap], self.whole[gap + like.numel() :]]

    def check(self) -> None:
        assert all(bool((edge == MARK).all()) for edge in self.outside), "written outside of the parameter"


# --- a server hears a push --------------------------------------------------------------------------------------------


@every
def test_whatever_is_pushed(compression: Compressor) -> None:
    ctx = Context(step=0, rank=0, workers=1)
    specs = [Spec("p", shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.float64)]
    honest = {}
    for spec in specs:
        grad = torch.randn(spec.numel, generator=torch.Generator().manual_seed(1)).to(spec.dtype)
        piece = Piece(spec, grad, torch.empty_like(grad), value=value_of(grad))
        honest[spec] = [bytes(raw(word)) for word in encode_push(compression, piece, {}, ctx)]
    refused = 0
    for seed in frames():
        dice = random.Random(f"{compression}/{seed}")
        spec = dice.choice(specs)
        words = [damaged(word, dice) if dice.random() < 0.6 else word for word in honest[spec]]
        words = resized(words, dice) if dice.random() < 0.4 else words
        zeros = torch.zeros(spec.numel, dtype=spec.dtype)
        room = Room(zeros, marked=bool(seed % 2))
        try:
            decode_push(compression, map(memoryview, map(bytearray, words)), Piece(spec, zeros, room.inside), ctx)
        except PayloadError:
            refused += 1
        room.check()
    assert refused, "nothing was damaged"


# --- a worker hears its peers -----------------------------------------------------------------------------------------


def conversation(compression: Compressor, specs: Sequence[Spec], grads: Sequence[dict[str, Tensor]]) -> list[list[Op]]:
    """What each worker says in an honest exchange."""
    encode_push: list[list[Op]] = [[] for _ in grads]
    flows = []
    for rank, mine in enumerate(grads):
        pieces = [Piece(s, mine[s.name].clone(), mine[s.name].clone(), value=value_of(mine[s.name])) for s in specs]
        ctx = Context(step=0, rank=rank, workers=len(grads))
        flow = compression.exchange(Bucket(tuple(pieces)), {}, ctx)
        flows.append(tapped(flow, lambda op, rank=rank: encode_push[rank].append(copied(op))))  # type: ignore[misc]
    loopback.run(flows)
    return encode_push


def copied(op: Op) -> Op:
    match op:
        case Sum(payload):
            return Sum(payload.clone())
        case All(payload):
            return All(tuple(part.clone() for part in payload))
        case Scatter(parts):
            return Scatter([tuple(part.clone() for part in each) for each in parts])
    raise AssertionError(f"not a collective: {op}")


def for_me(op: Any) -> Payload:
    """What worker 0 gets of what a peer says."""
    match op:
        case Sum(payload):
            return (payload,)
        case All(payload):
            return tuple(payload)
    return tuple(op.parts[0])


def answer(mine: Any, theirs: Sequence[bytes]) -> Any:
    """A collective's result: a receiver knows how much it waits for, and gets so many bytes of each peer."""
    like = for_me(mine)
    payloads = [like]
    for data in theirs:
        fitted = data[: nbytes(like)].ljust(nbytes(like), b"\1")
        row = torch.frombuffer(bytearray(fitted), dtype=torch.uint8) if fitted else torch.empty(0, dtype=torch.uint8)
        payloads.append(unpack(row.clone(), like))
    if isinstance(mine, Sum):
        return torch.stack([part for (part,) in payloads]).sum(0, dtype=like[0].dtype)
    return payloads


def overheard(flow: Any, peers: Sequence[Sequence[Op]], spoil: Callable[[bytes], bytes]) -> None:
    """Drive worker 0's exchange with its peers' words, spoiled."""
    result: Any = None
    for turn in range(len(peers[0]) + 1):
        try:
            mine = flow.send(result)
        except StopIteration:
            return
        theirs = [for_me(peer[turn]) if turn < len(peer) else () for peer in peers]
        result = answer(mine, [spoil(bytes(raw(pack(payload))) if payload else b"") for payload in theirs])
    raise AssertionError("an exchange asks for more than an honest one does")


@every
def test_whatever_peers_say(compression: Compressor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one parameter is exchanged and its peers are refused, its gradient is as it was."""
    monkeypatch.setattr(_coded, "A_ROUND", 16)  # large parameters travel in two phases
    talks = []
    for shapes in BUCKETS:
        for dtype in (torch.float32, torch.float64):
            specs = specs_of(shapes, dtype)
            grads = draw(specs, 3, 1)
            talks.append((specs, grads[0], conversation(compression, specs, grads)[1:]))
    for seed in frames():
        dice = random.Random(f"{compression}/{seed}")
        specs, grads, peers = dice.choice(talks)
        scratch_memory = [Room(grads[spec.name], marked=bool(seed % 2)) for spec in specs]
        pieces = [
            Piece(spec, room.inside, room.inside, value=value_of(room.inside))
            for spec, room in zip(specs, scratch_memory, strict=True)
        ]
        flow = compression.exchange(Bucket(tuple(pieces)), {}, Context(step=0, rank=0, workers=3))
        try:
            overheard(flow, peers, lambda data, dice=dice: damaged(data, dice) if dice.random() < 0.6 else data)  # type: ignore[misc]
        except PayloadError:
            assert len(specs) > 1 or torch.equal(scratch_memory[0].inside, grads[specs[0].name])
        for room in scratch_memory:
            room.check()


# --- who watches ------------------------------------------------------------------------------------------------------

OUTSIDE = """
import torch
from weft.kernels import cpu
cpu.int8_decode(torch.zeros(64, dtype=torch.int8), torch.zeros(8), 8, torch.zeros(65), False)
print("not seen")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("WEFT_SANITIZE") != "1", reason="kernels are built without sanitizers")
def test_sanitizers_see_a_read_outside() -> None:
    done = subprocess.run([sys.executable, "-c", OUTSIDE], capture_output=True, text=True, timeout=300)
    assert "heap-buffer-overflow" in done.stderr and "int8_decode" in done.stderr and not done.stdout
