"""Damaged pushes to a real server, under every compressor: those that are refused change nothing, and it serves on."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tests.process.harness import ChildError, spawn
from tests.process.spoiled import BAD_NAME, BAD_STEP, train
from tests.pure.test_fuzz_wire import damaged, every, resized
from weft.compression import Compressor, Context, Piece
from weft.errors import LoopError
from weft.ops import Spec
from weft.runtime.server.bundle_state import BundleState
from weft.runtime.server.client import ServerClient
from weft.runtime.server.compressed_push import encode_push
from weft.runtime.server.service import ShardService
from weft.strategy import Strategy
from weft.topology._shards import Range
from weft.transport.messaging import Client, Key, Refused
from weft.transport.tensor_bytes import raw

SPEC = Spec("w", (40, 25))
WAIT_S = 20
FRAMES = 30


@every
def test_a_refused_push_changes_no_model(compression: Compressor, caplog: pytest.LogCaptureFixture) -> None:
    part, key = nn.Parameter(torch.zeros(SPEC.shape)), Key.fresh()
    server = ShardService(
        ("127.0.0.1", 0),
        key,
        synchrony=Strategy.parse("asp").synchrony,
        compression=compression,
        kept=[BundleState([SPEC], [part], torch.optim.SGD([part], lr=0.1))],
        workers=1,
    )
    client = Client(server.address, key, "liar")
    me = ServerClient(0, [client], [[(Range("w", 0, SPEC.numel),)]], {"w": SPEC}, compression)
    me.join(WAIT_S)
    me.start({"w": torch.zeros(SPEC.numel)}, {}, (), WAIT_S)
    grad = torch.randn(SPEC.numel, generator=torch.Generator().manual_seed(3))
    refused = 0
    for step in range(FRAMES):
        dice = random.Random(f"{compression}/{step}")
        ctx = Context(step=step, rank=0, workers=1)
        piece = Piece(SPEC, grad.clone(), torch.empty_like(grad), value=torch.ones_like(grad))
        honest = [grad] if compression.raw else encode_push(compression, piece, {}, ctx)
        words = [bytes(raw(word)) for word in honest]
        if step < FRAMES - 1:
            words = [damaged(word, dice) for word in words]
            words = resized(words, dice) if step % 2 else words
        me.begin(step, 1.0, [{"lr": 0.1}])
        me.fetch(WAIT_S)  # one thread serves, so whatever came before counts by now
        before = bytes(raw(part.detach()))
        try:
            me.push_bundle(me.routes[0], [memoryview(word) for word in words], step)
            me.pushed(WAIT_S)
        except Refused:
            refused += 1
            me.fetch(WAIT_S)
            assert bytes(raw(part.detach())) == before
            assert step < FRAMES - 1, "an honest push was refused"
    me.fetch(WAIT_S)
    assert refused and server.version
    client.close()
    server.close()


def overflow() -> None:
    words, fine = train(1e9, None)
    raise LoopError(f"the model is {'' if fine else 'not '}finite: {words}")


@pytest.mark.parametrize("compression", ["cast(dtype=fp16)", "error_feedback(cast(dtype=fp16))"])
def test_a_push_that_overflows_is_named(compression: str) -> None:
    """Servers hear nothing of it: the model stays finite, and the sentence names compressor and parameter."""
    with pytest.raises(ChildError) as caught:
        spawn(1, overflow, WEFT_STRATEGY=f"bsp / parameter_server / {compression}")
    expected = f"the model is finite: {compression} makes NaN or infinite values of the gradient of {BAD_NAME} at "
    assert f"{expected}step {BAD_STEP}. Use cast(dtype=bf16)" in str(caught.value)
