"""One process of a job that runs under a peer: `python -m weft.lab.peers._child JOB …`, with WEFT_PEER set."""

from __future__ import annotations

import os

from weft.lab import peers
from weft.runtime import run
from weft.runtime.launch import child


def main() -> None:
    run.wrapper = peers.find(os.environ["WEFT_PEER"]).wrap
    child.main()


if __name__ == "__main__":
    main()
