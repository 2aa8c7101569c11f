"""What compressors do on a GPU is what they do in plain PyTorch. Without one, Triton can act it: TRITON_INTERPRET=1."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pure.test_compressors import CODED, KINDS, sent
from weft import kernels
from weft.compression import Bucket, Context, Piece, State
from weft.compression.powersgd import basis, orthonormal
from weft.ops import Spec
from weft.strategy import Strategy
from weft.transport import loopback

ACTED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if ACTED else "cuda"
pytestmark = pytest.mark.skipif(not ACTED and not torch.cuda.is_available(), reason="needs a GPU")


def of(text: str) -> Any:
    return Strategy.parse(text).compression


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's functions, and for what lies on the CPU plain PyTorch's."""
    from weft.kernels import cuda

    def choose(tensor: Tensor) -> Any:
        return cuda if tensor.dtype is torch.float32 and tensor.is_contiguous() and choose.fast else None

    choose.fast = True
    monkeypatch.setattr(kernels, "of", choose)
    return choose


def coded(compression: Any, x: Tensor, width: int, residual: Tensor | None, pending: bool, fast: Any) -> Tensor:
    code = torch.zeros(compression.size(x.numel(), width), dtype=torch.uint8, device=x.device)
    if pending and residual is not None and not fast.fast:
        x, pending = residual.add_(x), False
    compression.encode(x, code, width, 77, residual, pending)
    return code


MORE = ["qsgd(levels=7)", "qsgd(levels=127, bucket=64)", "int8(block=8)", "int8(block=20000)", "qsgd(bucket=20000)"]


@pytest.mark.parametrize("text", [*CODED, *MORE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pending", [False, True], ids=["at once", "with what was owed"])
def test_codes_are_those_of_plain_paths(text: str, kind: str, pending: bool, fast: Any) -> None:
    """Decoders give the same bits; encoders differ by a last bit at most, where they add up in another order."""
    compression = of(text)
    for count, width in ((1, 1), (7, 7), (64, 8), (1029 * 3, 1029), (5000, 50), (2 * 17001, 17001)):
        x = KINDS[kind](count)
        before = 0.1 * x.flip(0)
        found = []
        for fast.fast in (True, False):
            device = DEVICE if fast.fast else "cpu"
            residual = before.clone().to(device) if pending else torch.zeros(count, device=device)
            found.append(
                (
                    coded(compression, x.clone().to(device), width, residual, pending, fast).cpu(),
                    residual.cpu(),
                )
            )
        (code, residual), (plain_code, plain_residual) = found
        due = before + x if pending else x
        outs = []
        for fast.fast, add in itertools.product((True, False), repeat=2):
            device = DEVICE if fast.fast else "cpu"
            out = x.clone().to(device)
            compression.decode(code.to(device), out, width, add)
            outs.append(out.cpu())
        assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
        assert torch.equal(residual, due - outs[1])
        size = float(due.abs().max()) + 1e-37
        assert float((residual - plain_residual).abs().max()) <= 1e-5 * size or not torch.equal(code, plain_code)
        differing = int((code != plain_code).sum())
        assert differing <= 0.02 * code.numel() + 16 * -(-count // 8)


@pytest.mark.parametrize("count", [1, 1000, 3 << 16])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "subnormal"])  # a GPU's adding makes zeros of those
def test_the_largest_are_found(kind: str, count: int) -> None:
    x = KINDS[kind](count).to(DEVICE)
    for ratio in (0.01, 0.2, 0.9):
        got = sent(of(f"topk(ratio={ratio})"), x, (count,))
        k = max(1, -(-int(ratio * 1000) * count // 1000))
        assert torch.equal(got.abs().topk(k).values, x.abs().topk(k).values)
        assert torch.equal(got[got != 0], x[got != 0]) and int((got != 0).sum()) <= k


def test_sampling_sends_about_as_many() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = sent(of("topk(ratio=0.01, sampled=true)"), x, (200_000,))
    assert 1000 <= int((got != 0).sum()) <= 2000 and torch.equal(got[got != 0], x[got != 0])


@pytest.mark.parametrize("rank", [1, 3, 4, 9])
def test_thin_matrices(rank: int, fast: Any) -> None:
    for shape in ((70, 40), (600, 530), (33, 1100)):
        random = torch.Generator().manual_seed(rank)
        x, residual = torch.randn(shape, generator=random), torch.randn(shape, generator=random)
        outcomes = []
        for fast.fast in (True, False):
            device = DEVICE if fast.fast else "cpu"
            state: State = {"p": {"residual": residual.reshape(-1).clone().to(device)}}
            for step in range(2):
                grad = x.reshape(-1).clone().to(device)
                piece = Piece(Spec("p", shape), grad, grad)
                flow = of(f"error_feedback(powersgd(rank={rank}))").exchange(
                    Bucket((piece,)), state, Context(step=step, rank=0, workers=1)
                )
                loopback.run([flow])
            outcomes.append((piece.mean.cpu(), state["p"]["residual"].cpu()))
        for ours, plain in zip(*outcomes, strict=True):
            assert torch.allclose(ours, plain, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 4, 7])
def test_orthonormal(rank: int, fast: Any) -> None:
    wide = torch.randn(300, rank, generator=torch.Generator().manual_seed(1))
    wide[:, rank // 2] = wide[:, 0]  # nothing is left of it
    products = wide.double().T @ wide.double()
    assert torch.allclose(kernels.of(wide).basis(products.to(DEVICE)).cpu(), basis(products), rtol=1e-9, atol=1e-12)
    fast.fast = False
    columns = orthonormal(wide)
    length = (columns.T @ columns).diagonal()
    assert torch.allclose(columns.T @ columns, torch.diag(length), atol=1e-5)
    assert all(abs(float(each) - 1) < 1e-5 or float(each) == 0 for each in length)
