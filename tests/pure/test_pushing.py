"""What a server hears of a push is what its worker sent, for every compressor and over many steps."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.pure.test_laws import SHAPES, compressors, dtypes, specs_of, value_of
from weft.compression import Compressor, Context, Piece, State
from weft.runtime.pushing import heard, said
from weft.transport.mesh import raw


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
            words = said(compression, Piece(spec, grad.clone(), mean, value=value_of(grad)), state, ctx)
            there = torch.zeros(spec.numel, dtype=dtype)
            heard(compression, map(raw, words), Piece(spec, torch.zeros_like(grad), there), ctx)
            assert torch.equal(there, mean), (number, step)


def test_a_push_with_too_few_parts_is_refused() -> None:
    from weft.compression.dense import Dense
    from weft.ops import Spec

    spec = Spec("w", (4,))
    with pytest.raises(ValueError, match="fewer parts"):
        heard(Dense(), [], Piece(spec, torch.zeros(4), torch.zeros(4)), Context(step=0, rank=0, workers=1))
