"""Comparisons as Markdown, for docs/performance.md.

weft compare wide "bsp / ring" --peers ddp --hosts 4 --bandwidth 1gbit --out runs/wide-1g
python bench/tables.py runs/wide-1g …
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from weft.units import Bandwidth, bytes_text

HEADS = [
    "",
    "step, ms",
    "samples/s",
    "speed-up",
    "sent",
    "busiest link",
    "exposed, ms",
    "bound, ms",
    "of bound",
    "loss",
]


def table(result: dict[str, Any]) -> str:
    """The command, where it ran, and the rows."""
    machine, cluster = result["machine"], result["cluster"]
    rates = sorted({str(Bandwidth(link["asked_bit_s"])) for link in cluster["links"]})
    one = result["one_host"]
    counted = result["steps"] - result["warmup"]
    alone = next(row["compute_s"] for row in result["rows"] if row["compute_s"])
    lines = [
        f"`{result['command']}`",
        "",
        f"{cluster['hosts']} hosts at {', '.join(rates)}, {result['compute']} compute on {machine['cores']} cores "
        f"({machine['threads']} thread{'s' * (machine['threads'] > 1)} a host), {counted} steps after "
        f"{result['warmup']} of warm-up × {len(result['seeds'])} seeds; one host alone {one['step_s'] * 1e3:.0f} ms, "
        f"all computing alone {alone * 1e3:.0f} ms a step; "
        f"CPU {machine['cpu_share']:.0%}, steal {machine['steal_share']:.1%}; torch {machine['versions']['torch']}, "
        f"{result['date'][:10]}.",
        "",
        "| " + " | ".join(HEADS) + " |",
        "|" + "---|" * len(HEADS),
    ]
    return "\n".join(lines + [_row(row) for row in result["rows"]]) + "\n"


def _row(row: dict[str, Any]) -> str:
    if row["step_s"] is None:
        return f"| {row['name']} | {row['error']} |" + " |" * (len(HEADS) - 2)
    cells = [
        row["name"],
        f"**{row['step_s'] * 1e3:.0f}** ± {row['step_s_spread'] * 1e3:.0f}",
        f"{row['samples_per_s']:.1f}",
        f"{row['speedup']:.2f}" if row["speedup"] else "",
        bytes_text(row["wire_bytes_worker"]),
        bytes_text(row["wire_bytes_link"]) if row["wire_bytes_link"] is not None else "",
        f"{row['exposed_s'] * 1e3:.0f}",
        f"{row['bound_s'] * 1e3:.0f}" if row["bound_s"] is not None else "",
        f"{row['bound_share']:.0%}" if row["bound_share"] is not None else "",
        f"{row['final_loss']:.3f}" if row["final_loss"] is not None else "",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    for folder in sys.argv[1:]:
        print(table(json.loads((Path(folder) / "compare.json").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
