"""How a way of distributing affects learning: its held-out loss over that of dense training, as measured.

The figures are those of docs/compression.md, "Effect on learning": 1,000 steps of `text` from a random start.
"""

from __future__ import annotations

from weft.axis import DEFAULTS
from weft.lab.contender import Contender

HELD_OUT = {
    "dense": 1.0,
    "cast": 1.0,
    "int8": 1.001,
    "int8(stochastic=true)": 0.998,
    "qsgd(levels=7, bucket=128, norm=max)": 1.004,
    "qsgd(levels=7, norm=max)": 1.010,
    "qsgd(levels=3, bucket=64, norm=max)": 1.013,
    "qsgd(levels=3, norm=max)": 1.025,
    "qsgd": 1.035,
    "error_feedback(significant)": 1.036,
    "error_feedback(powersgd(rank=16))": 1.039,
    "onebit": 1.066,
    "terngrad": 1.112,
    "qsgd(levels=1, norm=max)": 1.134,
    "qsgd(levels=7)": 1.146,
    "error_feedback(onebit)": 1.163,
    "error_feedback(powersgd)": 1.167,
    "sign": 1.223,
    "error_feedback(adacomp)": 1.486,
    "topk(ratio=0.01)": 1.545,
    "error_feedback(sign(scaled=true))": 1.621,
    "error_feedback(topk(ratio=0.01))": 1.681,
    "error_feedback(gradient_dropping)": 1.705,
    "error_feedback(threshold(tau=0.001))": 1.805,
    "error_feedback(twobit(threshold=0.001))": 1.828,
    "error_feedback(topk)": 1.836,
    "error_feedback(random_k)": 1.927,
    "error_feedback(twobit)": 1.973,
    "dgc(ratio=0.01)": 1.291,
    "dgc(warmup=200)": 1.314,
    "dgc(ratio=0.01, clip=0.25, warmup=200)": 0.938,
}
"""By compressor, in its canonical spelling: the ratio of held-out losses."""
PEERS = {"ddp": "dense", "ddp-tuned": "dense", "fsdp": "dense", "ddp-fp16": "cast"}
"""The compressor that a peer corresponds to; the learning of other peers has not been measured."""
AS_DENSE = 1.014
"""The ratio up to which a compressor learns as dense training does: the highest of three seeds of dense training."""


def measured(contender: Contender) -> float | None:
    """The ratio of held-out losses; None where it has not been measured, as for other synchronies or with servers."""
    if contender.strategy is None:
        return HELD_OUT.get(PEERS.get(contender.peer or "", ""))
    strategy = contender.strategy
    if any(str(getattr(strategy, axis)) != DEFAULTS[axis] for axis in ("optimization", "synchrony")):
        return None
    if strategy.compression.lossless:
        return 1.0
    return None if strategy.has_servers else HELD_OUT.get(str(strategy.compression))


def as_dense(ratio: float | None) -> bool:
    return ratio is not None and ratio <= AS_DENSE


def text(ratio: float | None) -> str:
    """`as dense`, `+68 % held-out loss` or `not measured`."""
    if ratio is None:
        return "not measured"
    percent = round(100 * (ratio - 1))
    return f"+{percent} % held-out loss" if percent > 0 else "as dense"
