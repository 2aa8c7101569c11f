"""The commands in the code blocks of README.md and docs/, and how each is tested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TINY = "-- --size tiny"
SHORT = "--steps 10 --seeds 1 --links auto"

RUN = {
    "README.md": {
        "weft train job.py -n 2": "",
        "weft compare job.py --hosts 4 --bandwidth 100mbit": f'"bsp / direct" --hosts 2 {SHORT}',
        'weft train wide -n 2 --steps 40 --strategy "bsp / ring / cast"': TINY,
        'weft check "bsp / direct / int8 / priority"': "",
        'weft check "asp / ring"': "",
        'weft compare wide "bsp / direct" "bsp / direct / int8" --peers ddp --hosts 2 --bandwidth 100mbit': (
            f"{SHORT} {TINY}"
        ),
        'weft train wide -n 2 --steps 40 --strategy "bsp / direct / priority"': TINY,
        'weft train wide -n 4 --steps 40 --strategy "ssp(slack=4) / parameter_server(servers=2)"': TINY,
        "weft train wide -n 4 --steps 100 --save-every 50 --out runs/mine": TINY,
        "weft train --resume runs/mine --processes 2 --steps 200": "",
        "weft train text -n 2 --steps 40 --system horovod": TINY,
        "weft systems --status runs": "",
        "weft doctor": "",
    },
    "docs/reliability.md": {
        "weft train job.py -n 4 --save-every 20 --steps 24 --out runs/mine": "",
        "weft train --resume runs/mine --steps 28": "",
        "weft train --resume runs/mine --processes 2 --steps 32": "",
    },
    "docs/lab.md": {
        'weft compare wide "bsp / ring" "bsp / ring / cast" --peers ddp --hosts 4 --bandwidth 1gbit': (
            f"--hosts 2 {SHORT} {TINY}"
        ),
    },
    "docs/tracking.md": {
        "weft train wide -n 2 --steps 8 --out runs/first -- --size tiny": "",
        "weft export runs/first --to csv": "",
        "weft export runs/first --to tensorboard": "",
        "weft export runs/first --to mlflow": "",
        "weft export runs/first --to mlflow --out mlruns": "",
    },
}
"""By page, commands that `tests/process/test_documented_commands.py` runs, and the arguments that make them short."""

COVERED = {
    "weft train text --hosts 4 --bandwidth 100mbit --link 2=10mbit --slow 3=4x": (
        "tests/net/test_compare.py::test_train_on_an_emulated_cluster_with_a_straggler"
    ),
    "weft lab up --hosts 4": "tests/net/test_compare.py::test_a_lab_to_look_around_in",
    "weft lab exec 1 -- ip addr": "tests/net/test_compare.py::test_a_lab_to_look_around_in",
    "weft lab down": "tests/net/test_compare.py::test_a_lab_to_look_around_in",
    **{
        f"weft train job.py -n 8 --nodes 2 --node-rank {rank} --rendezvous 10.0.0.1:29500 "
        "--network trusted --out /shared/run": (
            "tests/process/test_launch.py::test_two_nodes_meet_and_only_on_the_address_given"
        )
        for rank in (0, 1)
    },
    "weft key /home/me/run.key": "tests/net/test_join.py::test_by_nodes_the_last_ranks_are_servers",
    'weft train job.py -n 6 --strategy "asp / parameter_server(servers=2)" --key-file run.key --nodes 4 --node-rank R '
    "--rendezvous 10.0.0.1:29500 --out /shared/run": (
        "tests/net/test_join.py::test_by_nodes_the_last_ranks_are_servers"
    ),
    "weft join 10.0.0.1:29500 --key-file run.key": (
        "tests/net/test_join.py::test_by_hand_whoever_has_the_key_gets_a_seat"
    ),
    'WEFT_NETWORK=trusted WEFT_OUT=/shared/run WEFT_STRATEGY="bsp / ring / wfbp" torchrun --nnodes 2 '
    "--nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 job.py": (
        "tests/net/test_join.py::test_under_torchrun_the_last_ranks_are_servers"
    ),
    "weft export runs/first --to mlflow --out http://tracking.example:5000": (
        "tests/process/test_export_doctor.py::test_mlflow_over_http"
    ),
}
"""Commands that need addresses or a cluster: the test that runs the same with others."""

TUTORIAL = "docs/tutorial.md"
"""Its commands are run by `tests/process/test_tutorial.py`."""

_BLOCK = re.compile(r"(?m)(?:^<!-- ([^>]*) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL)
_COMMAND = re.compile(
    r'(?:\w+=(?:"[^"]*"|\S+) )*(?:\.venv/bin/)?(?:weft|python3?|pip|pytest|make|torchrun|tensorboard|mlflow|srun)\b"
)
_MARK = re.compile(r"by hand: \d{4}-\d\d-\d\d|untested: .+")


@dataclass(frozen=True)
class Shown:
    """A command as a page shows it, the output that follows it, and whether it is marked as not tested here."""

    page: str
    line: str
    output: tuple[str, ...] = ()
    marked: bool = False


def shown(page: Path) -> Iterator[Shown]:
    """The commands in the code blocks of a page: lines after `$`, or else all lines of a block of commands."""
    name = str(page.relative_to(ROOT))
    for mark, language, body in _BLOCK.findall(page.read_text(encoding="utf-8")):
        lines = [line for line in body.replace("\\\n", " ").splitlines() if line.strip()]
        marked = _MARK.fullmatch(mark) is not None
        if language not in ("", "bash", "console"):
            continue
        if any(line.startswith("$ ") for line in lines):
            yield from _session(name, lines, marked)
        elif any(_COMMAND.match(line) for line in lines):
            yield from (Shown(name, plain(line), marked=marked) for line in lines if not line.startswith("#"))


def _session(page: str, lines: list[str], marked: bool) -> Iterator[Shown]:
    """Commands with their output."""
    starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
    for at, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield Shown(page, plain(lines[at][2:]), tuple(lines[at + 1 : end]), marked)


def plain(line: str) -> str:
    """A command without the comment behind it, and with single spaces."""
    return " ".join(re.split(r"\s{2,}#|\s# ", line)[0].split())


def scripts() -> dict[str, str]:
    """The scripts of the tutorial: a block of Python is saved as the name that the text before it gives."""
    text = (ROOT / TUTORIAL).read_text(encoding="utf-8")
    return dict(re.findall(r"(?s)\bas `(\w+\.py)`[^`]*?\n\n```python\n(.*?)```", text))
