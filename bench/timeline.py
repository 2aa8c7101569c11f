"""One recorded step per run as a picture: what the loop does, and what is on the wire meanwhile.

weft train text -n 2 --steps 12 --trace --strategy "bsp / ring / wfbp" --out runs/wfbp    (and others alike)
python bench/timeline.py runs/sequential runs/wfbp runs/fused --step 9 --out docs/timeline.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLOURS = {
    "forward": "#7fb3d5",
    "backward": "#2874a6",
    "wait": "#f5b7b1",
    "optimizer": "#7d6608",
    "wire": "#e67e22",
}
WIDTH, LEFT, ROW, GAP = 900, 20, 22, 14


def spans(folder: Path, step: int) -> tuple[str, list[tuple[str, float, float]]]:
    """A run's strategy, and process 0's spans in milliseconds since the step's forward."""
    strategy = json.loads((folder / "environment.json").read_text())["strategy"]
    events = json.loads((folder / "trace-0.json").read_text())["traceEvents"]
    mine = [event for event in events if event.get("args", {}).get("step") == step]
    start = min(event["ts"] for event in mine)
    found = []
    for event in mine:
        name = "wire" if event["name"].startswith("bucket") else event["name"]
        if name in COLOURS:
            found.append((name, (event["ts"] - start) / 1e3, event["dur"] / 1e3))
    return strategy, found


def picture(runs: list[tuple[str, list[tuple[str, float, float]]]]) -> str:
    longest = max(at + length for _, run in runs for _, at, length in run)
    scale = (WIDTH - 2 * LEFT) / longest
    parts: list[Any] = []
    y = 34
    for strategy, run in runs:
        end = max(at + length for _, at, length in run)
        parts.append(f'<text x="{LEFT}" y="{y - 5}" font-weight="bold">{strategy}</text>')
        parts.append(f'<text x="{WIDTH - LEFT}" y="{y - 5}" text-anchor="end">{end:.0f} ms</text>')
        for name, at, length in run:
            top = y + (ROW if name == "wire" else 0)
            box = f'x="{LEFT + at * scale:.1f}" y="{top}" width="{max(0.5, length * scale):.1f}" height="{ROW - 3}"'
            parts.append(f'<rect {box} fill="{COLOURS[name]}" fill-opacity="{0.6 if name == "wire" else 1}"/>')
        y += 2 * ROW + GAP + 18
    for i, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + 130 * i
        parts.append(f'<rect x="{x}" y="{y - 14}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y - 2}">{"on the wire" if name == "wire" else name}</text>')
    size = f'viewBox="0 0 {WIDTH} {y + 10}" font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y + 10}" fill="white"/>', *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--step", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("timeline.svg"))
    args = parser.parse_args()
    args.out.write_text(picture([spans(folder, args.step) for folder in args.runs]), encoding="utf-8")


if __name__ == "__main__":
    main()
