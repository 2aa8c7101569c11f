"""What a server hears of a push is what its worker sent, for every compressor and over many steps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.pure.laws.test_compression import SHAPES, compressors, dtypes, specs_of, value_of
from weft import kernels
from weft.compression import Compressor, Context, Piece, State
from weft.errors import LoopError, PayloadError
from weft.ops import Spec
from weft.runtime.server.compressed_push import decode_push, encode_push
from weft.strategy import Strategy
from weft.transport.tensor_bytes import raw


@compressors
@dtypes
def test_a_server_hears_what_was_sent(compression: Compressor, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    for number, spec in enumerate(itertools.chain.from_iterable(specs_of(shapes, dtype) for shapes in SHAPES)):
        state: State = {}
        for step in range(3):
            ctx = Context(step=step, rank=2, workers=1, seed=7)
            grad = torch.randn(spec.numel, generator=rng).to(dtype)
            mean = torch.empty_like(grad)
            words = encode_push(compression, Piece(spec, grad.clone(), mean, value=value_of(grad)), state, ctx)
            there = torch.zeros(spec.numel, dtype=dtype)
            decode_push(compression, map(raw, words), Piece(spec, torch.zeros_like(grad), there), ctx)
            assert torch.equal(there, mean), (number, step)


@compressors
@pytest.mark.parametrize("size", [1e5, 3.3e38])
def test_a_finite_gradient_is_sent_as_one_or_refused(compression: Compressor, size: float) -> None:
    """Under fp16 100,000 is infinite; the sentence names parameter and compressor, and the residual stays finite."""
    spec, grad, state, ctx = Spec("w", (100,)), torch.full((100,), size), State(), Context(step=3, rank=0, workers=1)
    grad[::2] = -1e-3
    refusal, there = "", torch.zeros(100)
    try:
        words = encode_push(compression, Piece(spec, grad.clone(), torch.empty(100), value=value_of(grad)), state, ctx)
        decode_push(compression, map(raw, words), Piece(spec, torch.zeros(100), there), ctx)
    except LoopError as error:
        refusal = str(error)
    assert bool(torch.isfinite(there).all())
    assert bool(refusal) is ("fp16" in str(compression)) or size > 1e38
    assert not refusal or refusal.startswith(f"{compression} makes NaN or infinite values of the gradient of w at")
    assert all(bool(torch.isfinite(kept).all()) for memory in state.values() for kept in memory.values())


@compressors
@pytest.mark.parametrize("shape", [(), (12,), (6, 5), (2, 3, 4)], ids=str)
def test_complex_gradients_are_pairs_of_real_ones(compression: Compressor, shape: tuple[int, ...]) -> None:
    """Real and imaginary parts arrive as the same numbers do in a parameter of twice as many real values."""
    spec, ctx = Spec("w", shape, torch.complex64), Context(step=0, rank=0, workers=1)
    grad = torch.randn(spec.numel, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    found = []
    for each, sent in ((spec, grad), (spec.real(), torch.view_as_real(grad).reshape(-1))):
        mean, there = torch.empty_like(sent), torch.zeros_like(sent)
        words = encode_push(compression, Piece(each, sent.clone(), mean, value=torch.zeros_like(sent)), {}, ctx)
        decode_push(compression, map(raw, words), Piece(each, torch.zeros_like(sent), there), ctx)
        assert torch.equal(there, mean)
        found.append(there)
    assert found[0].dtype is torch.complex64 and torch.equal(found[0].view(torch.float32), found[1])


def pushed(text: str, *words: Tensor) -> Tensor:
    """What a server makes of these words about 100 values, which lie in the middle of 300."""
    room = torch.full((300,), 7.0)
    piece = Piece(Spec("w", (100,)), torch.zeros(100), room[100:200])
    ctx = Context(step=0, rank=0, workers=1)
    try:
        decode_push(Strategy.parse(text).compression, map(raw, words), piece, ctx)
    finally:
        assert bool((room[:100] == 7).all()) and bool((room[200:] == 7).all()), "written outside of the parameter"
    return piece.mean


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("place", [-(2**31), -1, 100, 150, 2**31 - 1])
@pytest.mark.parametrize(
    "text", ["topk(ratio=0.02)", "dgc(ratio=0.02)", "gradient_dropping", "significant", "threshold"]
)
def test_a_place_outside_of_the_parameter_is_refused(text: str, place: int) -> None:
    """The first of two is good, and is not added either."""
    words: tuple[Tensor, ...] = torch.ones(2), whole(3, place)
    if text == "threshold":
        place = place >> 1 if abs(place) > 200 else place
        words = whole(2), torch.ones(1), whole(6, place * 2)
    elif text in ("gradient_dropping", "significant"):
        words = whole(2), torch.empty(0), *words
    with pytest.raises(PayloadError, match="has index"):
        pushed(text, *words)


@pytest.mark.parametrize("count", [-(2**31), -1, 101, 2**31 - 1])
@pytest.mark.parametrize("text", ["gradient_dropping", "significant", "threshold", "adacomp"])
def test_a_count_beyond_the_parameter_is_refused_before_there_is_room_for_it(text: str, count: int) -> None:
    scale = torch.ones(1 if text in ("threshold", "adacomp") else 0)
    with pytest.raises(PayloadError, match="announces"):
        pushed(text, whole(count), scale, torch.ones(1), whole(0))


@pytest.mark.parametrize("place", [-1, 100])
def test_the_kernel_writes_nothing_outside(place: int) -> None:
    room = torch.zeros(300)
    fast = kernels.of(room)
    assert fast is not None, "there is a compiler, and fast paths are not used"
    with pytest.raises(PayloadError, match="outside"):
        fast.sparse_add(whole(3, place), torch.ones(2), room[100:200])
    assert not room.any()


def test_a_push_with_other_parts_than_needed_is_refused() -> None:
    good = torch.ones(100)
    assert torch.equal(pushed("dense", good), good)
    with pytest.raises(PayloadError, match="fewer parts"):
        pushed("dense")
    with pytest.raises(PayloadError, match="more parts"):
        pushed("dense", good, good)
    for size in (0, 1, 99, 101):
        with pytest.raises(PayloadError, match="bytes where its compressor needs 400"):
            pushed("dense", torch.ones(size))
