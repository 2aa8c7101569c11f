"""The stamps of a step's phases, in a model that is compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.runtime.record.clock import Clock
from weft.runtime.record.phases import PhaseTimer


def test_compiling_a_model_whose_forwards_are_stamped_breaks_no_graph_and_warns_of_nothing() -> None:
    recorder: Any = object()
    phases = PhaseTimer(Clock(torch.device("cpu")), recorder)
    model = nn.Linear(2, 2)
    phases.attach(model)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(3, 2)), model(torch.ones(3, 2)))
    assert len(phases.forward) == 2  # of the plain call
