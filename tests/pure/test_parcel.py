"""Memory that a parcel's callback refers to is freed when the parcel is done, without the cycle collector."""

from __future__ import annotations

import gc
import weakref

from weft.errors import PeerLost
from weft.transport.parcel import Parcel


class Exchange:
    """An exchange that waits for its parcel, and holds gradients."""

    def __init__(self, parcel: Parcel) -> None:
        self.parcel = parcel
        parcel.then(lambda: self.go_on())

    def go_on(self) -> None:
        pass


def test_a_finished_parcel_lets_go_of_its_callback() -> None:
    gc.disable()
    try:
        for error in (None, PeerLost("worker 1 went away")):
            exchange = Exchange(Parcel(1))
            alive = weakref.ref(exchange)
            exchange.parcel.finish_one(error)
            del exchange
            assert alive() is None
    finally:
        gc.enable()
