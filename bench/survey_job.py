"""A job with the parameters of a surveyed model and nothing to compute: for sleeping compute (bench/survey.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import weft

sys.path.insert(0, str(Path(__file__).parent))
import survey_models

BATCH = 64


def main() -> None:
    run = weft.init(steps=25)
    model = survey_models.Shapes(survey_models.MODELS[sys.argv[1]]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.distribute(model, optimizer)
    for x in run.shard([torch.zeros(BATCH)] * run.workers, epochs=None):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
