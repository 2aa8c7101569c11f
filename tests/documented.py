"""The commands in the code blocks of README.md and docs/, and how each is tested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TINY = "-- --size tiny"

RUN = {
    "README.md": {
        'weft train wide -n 2 --steps 40 --strategy "bsp / ring / cast"': TINY,
        'weft check "bsp / direct / int8 / priority"': "",
        'weft check "asp / ring"': "",
        'weft train wide -n 2 --steps 40 --strategy "bsp / direct / priority"': TINY,
        'weft train wide -n 4 --steps 40 --strategy "ssp(slack=4) / parameter_server(servers=2)"': TINY,
        "weft train wide -n 4 --steps 100 --save-every 50 --out runs/mine": TINY,
        "weft train --resume runs/mine --processes 2 --steps 200": "",
        "weft systems --status runs": "",
    },
}
"""By page, commands that `tests/process/test_documented_commands.py` runs, and the arguments that make them short."""

COMPARED = "tests/net/test_compare.py::test_keys"
HELD_OUT = "tests/net/test_compare.py::test_the_time_to_a_held_out_loss"
HOSTS = "tests/net/test_compare.py::test_train_on_an_emulated_cluster_with_a_straggler"
LAB = "tests/net/test_compare.py::test_a_lab_to_look_around_in"
NODES = "tests/process/test_launch.py::test_two_nodes_meet_and_only_on_the_address_given"
SERVER_NODES = "tests/net/test_join.py::test_by_nodes_the_last_ranks_are_servers"
EXPORT = "tests/process/test_export_doctor.py::"

RESUME = "tests/process/test_resume.py::test_a_run_that_is_through_goes_on_with_more_steps"
PAGE = "tests/process/test_tutorial.py::test_everything_on_the_page"

COVERED = {
    "weft train job.py -n 2": PAGE,
    "weft compare job.py --hosts 4 --bandwidth 100mbit": PAGE,
    "weft train text -n 2 --steps 40 --system horovod": "tests/process/test_systems.py::test_the_mechanism_is_seen",
    "weft train job.py -n 4 --save-every 20 --steps 24 --out runs/mine": RESUME,
    "weft train --resume runs/mine --steps 28": RESUME,
    "weft train --resume runs/mine --processes 2 --steps 32": (
        "tests/process/test_documented_commands.py::test_commands_of_a_page"
    ),
    'weft compare wide "bsp / direct" "bsp / direct / int8" --peers ddp --hosts 2 --bandwidth 100mbit': COMPARED,
    'weft compare wide "bsp / ring" "bsp / ring / cast" --peers ddp --hosts 4 --bandwidth 1gbit': COMPARED,
    "weft compare wide --hosts 4 --bandwidth 1gbit": COMPARED,
    'weft compare text "bsp / direct" "outer(every=10) / bsp / direct" --bandwidth 100mbit --steps 200 '
    "--target-held-out 3.2 -- --size tiny --eval-every 10": HELD_OUT,
    "weft train text --hosts 4 --bandwidth 100mbit --link 2=10mbit --slow 3=4x": HOSTS,
    "weft lab up --hosts 4": LAB,
    "weft lab exec 1 -- ip addr": LAB,
    "weft lab down": LAB,
    "weft train job.py -n 8 --nodes 2 --node-rank 0 --rendezvous 10.0.0.1:29500 --network trusted --out /shared/run": (
        NODES
    ),
    "weft train job.py -n 8 --nodes 2 --node-rank 1 --rendezvous 10.0.0.1:29500 --network trusted --out /shared/run": (
        NODES
    ),
    "weft key /home/me/run.key": SERVER_NODES,
    'weft train job.py -n 6 --strategy "asp / parameter_server(servers=2)" --key-file run.key --nodes 4 --node-rank R '
    "--rendezvous 10.0.0.1:29500 --out /shared/run": SERVER_NODES,
    "weft join 10.0.0.1:29500 --key-file run.key": (
        "tests/net/test_join.py::test_by_hand_whoever_has_the_key_gets_a_seat"
    ),
    'WEFT_NETWORK=trusted WEFT_OUT=/shared/run WEFT_STRATEGY="bsp / ring / wfbp" torchrun --nnodes 2 '
    "--nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500 job.py": (
        "tests/net/test_join.py::test_under_torchrun_the_last_ranks_are_servers"
    ),
    "weft train wide -n 2 --steps 8 --out runs/first -- --size tiny": f"{EXPORT}test_csv_holds_the_events",
    "weft export runs/first --to csv": f"{EXPORT}test_csv_holds_the_events",
    "weft export runs/first --to tensorboard": (
        f"{EXPORT}test_tensorboard_reads_the_scalars_back_even_after_a_second_export"
    ),
    "weft export runs/first --to mlflow": f"{EXPORT}test_mlflow_reads_metrics_and_parameters_back",
    "weft export runs/first --to mlflow --out http://tracking.example:5000": f"{EXPORT}test_mlflow_over_http",
    "weft doctor": f"{EXPORT}test_doctor_needs_only_what_is_required_and_leaves_nothing",
}
"""Commands that another test runs, with addresses, jobs and sizes of its own."""

TUTORIAL = "docs/tutorial.md"
"""Its commands are run by `tests/process/test_tutorial.py`."""

_BLOCK = re.compile(r"(?m)(?:^<!-- ([^>]*) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL)
_COMMAND = re.compile(
    r'(?:\w+=(?:"[^"]*"|\S+) )*(?:\.venv/bin/)?(?:weft|python3?|pip|pytest|make|torchrun|tensorboard|mlflow|srun)\b'
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
