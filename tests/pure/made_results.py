"""Results of comparisons, made up for tests of what is said about them."""

from __future__ import annotations

import math
from typing import Any

from weft.lab.rows import Row


def row(name: str, step_s: float, *, spread_s: float = 0.02, **others: Any) -> dict[str, Any]:
    """A row as `weft compare` gives it, its figures in keeping with one another."""
    bound_s = step_s * 0.9
    figures: dict[str, Any] = {"step_s": step_s, "step_s_spread": spread_s, "samples_per_s": 128 / step_s}
    figures |= {"speedup": 0.38 * 4 / step_s, "wire_bytes_worker": 1.5e8, "wire_bytes_link": 1.57e8}
    figures |= {"compute_s": 0.4, "exposed_s": step_s - 0.4, "bound_s": bound_s, "bound_share": bound_s / step_s}
    figures |= {"final_loss": 2.31, "time_to_target_s": 12.3, "learning": 1.0}
    known = {"kind": "strategy", "sentence": f"{name}: every worker waits for every worker.", "compute": "real"}
    return Row(name=name, **(known | figures | others)).to_json()


def failed(name: str, error: str) -> dict[str, Any]:
    sentence = f"{name}: every worker waits for every worker."
    return Row(name=name, kind="strategy", sentence=sentence, compute="real", error=error).to_json()


def curve(step_s: float, step_bytes: float) -> dict[str, list[float]]:
    steps = range(1, 31)
    loss = [2.2 + 2 * math.exp(-step / 9) for step in steps]
    return {"time_s": [step * step_s for step in steps], "bytes": [step * step_bytes for step in steps], "loss": loss}


def timeline(step_s: float, buckets: int) -> dict[str, list[list[Any]]]:
    end = step_s - 0.02
    loop = [["forward", 0.0, 0.13], ["backward", 0.13, 0.38], ["wait", 0.38, end], ["optimizer", end, step_s]]
    each = (end - 0.2) / max(1, buckets)
    return {"loop": loop, "wire": [[i, 0.2 + i * each, 0.2 + (i + 1) * each] for i in range(buckets)]}


def sample() -> dict[str, Any]:
    """Four rows: two strategies, a peer, and one that failed, whose name and error look like markup."""
    rows = [row("bsp / ring", 1.27), row("bsp / ring / cast", 0.71), row("ddp", 1.35, kind="peer")]
    rows.append(failed("<b>asp</b> / $\\frac$", "worker 2 ended with <script>console.error(1)</script> & status 1"))
    link = {"asked_bit_s": 1e9, "up_bit_s": 0.998e9, "down_bit_s": 0.997e9, "payload_bytes_s": 1.19e8}
    done = rows[:3]
    return {
        "job": "wide",
        "command": "weft compare wide 'bsp / ring' --peers ddp --hosts 4 --bandwidth 1gbit",
        "compute": "real",
        "steps": 30,
        "warmup": 5,
        "seeds": [0, 1],
        "target_loss": 2.5,
        "target_held_out": None,
        "date": "2026-11-15T12:00:00Z",
        "cluster": {"hosts": 4, "emulated": True, "slow": ["3=4x"], "links": [{"host": i, **link} for i in range(4)]},
        "machine": {
            "cores": 2,
            "threads": 1,
            "system": "Linux-6.1",
            "processor": "AMD EPYC",
            "cpu_share": 0.93,
            "steal_share": 0.001,
            "other_cpu_share": 0.02,
            "versions": {"weft": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        },
        "one_host": {"step_s": 0.38, "step_s_spread": 0.01, "samples_per_s": 32 / 0.38},
        "rows": rows,
        "curves": {
            each["name"]: curve(each["step_s"], 1.5e8 if "cast" not in each["name"] else 0.75e8) for each in done
        },
        "timelines": {each["name"]: timeline(each["step_s"], 5) for each in done},
    }


def asleep() -> dict[str, Any]:
    """Nine rows with names of sixty characters on sixteen hosts, which only sleep."""
    tail = "error_feedback(topk(ratio=0.01)) / wfbp"
    names = [f"ssp(bound={i}) / ring / {tail}" for i in range(8)]
    rows = [row(name, 0.9 + 0.2 * i, speedup=None, final_loss=None) for i, name in enumerate(names)]
    rows.append(row("fsdp", 1.1, kind="peer", speedup=None, final_loss=None))
    for each in rows:
        each.update(compute="sleep", time_to_target_s=None, wire_bytes_link=None)
    link = {"asked_bit_s": 1e8, "up_bit_s": 0.998e8, "down_bit_s": 0.997e8, "payload_bytes_s": 1.19e7}
    cluster = {"hosts": 16, "emulated": True, "slow": [], "links": [{"host": i, **link} for i in range(16)]}
    lines = {each["name"]: timeline(each["step_s"], 4 * i) for i, each in enumerate(rows)}
    given = {"compute": "sleep", "rows": rows, "curves": {}, "timelines": lines, "one_host": None, "target_loss": None}
    return {**sample(), **given, "cluster": cluster}
