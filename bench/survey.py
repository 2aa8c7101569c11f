"""The survey's 10 GbE block at 16 GPUs [Shi et al. 2020], emulated: four hosts at 1 Gbit/s, sleeping compute.

A ring of 16 moves 1.875 times the gradient through each host's link, a ring of 4 only 1.5 times; the survey's hosts
reached 1.15 GB/s, an emulated link carries 0.119. So computing is made 7.7 times longer, which keeps its ratio to
communication. With servers, as many hosts as the workers', the gradient crosses a worker's link once each way on
either cluster, and computing is made 9.6 times longer. It is spread over the layers by their arithmetic
(bench/survey_models.py).

The more hosts, the closer are the two. `--write P` writes the ring's profile of a model, for all seven in one command:

    python bench/survey.py --models resnet50 --hosts 6 --bandwidth 500mbit --write P
    weft compare bench/survey_job.py --systems survey4 --compute sleep --profile P \\
        --hosts 6 --bandwidth 500mbit --steps 25 --seeds 1 -- resnet50

Scaling efficiency is throughput over that of as many single workers: computing alone over the step.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import weft
from weft.profile import Profile
from weft.units import Bandwidth

sys.path.insert(0, str(Path(__file__).parent))
import survey_models

PUBLISHED_BYTES_S = 1.15e9
PAYLOAD = 0.955
"""Of an emulated link's rate, what is left to payload."""
METHODS = {
    "BSP-PS": "bsp / parameter_server(servers=0) / sequential",
    "WFBP-PS": "bsp / parameter_server(servers=0) / wfbp",
    "ByteScheduler-PS": "bsp / parameter_server(servers=0) / priority(partition=4096KB, least=1B)",
    "BSP-A2A": "bsp / ring / sequential",
    "WFBP-A2A": "bsp / ring / wfbp",
    "MG-WFBP": "bsp / ring / mg_wfbp",
    "ByteScheduler-A2A": "bsp / ring / priority(least=1B)",
    "ours": "bsp / direct / priority",
}
COMPUTE_S = {"resnet50": 0.2529, "bert_base": 0.3008}
PUBLISHED = {
    "resnet50": {"BSP-A2A": 2485.12, "WFBP-A2A": 3146.78, "MG-WFBP": 3784.98, "ByteScheduler-A2A": 2701.52}
    | {"BSP-PS": 2361.27, "WFBP-PS": 3811.965, "ByteScheduler-PS": 3815.625},
    "bert_base": {"BSP-A2A": 984.88, "WFBP-A2A": 1069.48, "MG-WFBP": 1153.18, "ByteScheduler-A2A": 1177.4}
    | {"BSP-PS": 1022.375, "WFBP-PS": 1341.115, "ByteScheduler-PS": 1343.49},
}
"""Samples/s on 16 GPUs, 10 GbE with TCP/IP."""
ONE_GPU = {"resnet50": 253.1, "bert_base": 212.8}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(COMPUTE_S), default=list(COMPUTE_S))
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--out", type=Path, default=Path("runs/survey"))
    parser.add_argument("--write", type=Path, metavar="FILE", help="only write the first model's profile, for a ring")
    args = parser.parse_args()
    if args.write is not None:
        profile(args.models[0], args, servers=False).write(args.write)
        return
    print("| model | method | step, ms | computing, ms | bound, ms | efficiency | published | difference |")
    print("|---|---|---|---|---|---|---|---|")
    for model in args.models:
        for servers in (True, False):
            chosen = {name: METHODS[name] for name in args.methods if name.endswith("-PS") == servers}
            if chosen:
                measure(model, chosen, profile(model, args, servers), args.out / f"{model}-{servers}", args)


def profile(model: str, args: argparse.Namespace, servers: bool) -> Profile:
    """A model's computing, made longer as its communication is."""
    more = 1.0 if servers else ((args.hosts - 1) / args.hosts) / (15 / 16)
    stretch = more * PUBLISHED_BYTES_S / (Bandwidth.parse(args.bandwidth).bytes_s * PAYLOAD)
    return Profile.of(survey_models.profile(survey_models.MODELS[model](), COMPUTE_S[model] * stretch))


def measure(model: str, methods: dict[str, str], profile: Profile, out: Path, args: argparse.Namespace) -> None:
    """Run some methods side by side, and print a line for each."""
    result = weft.compare(
        str(Path(__file__).with_name("survey_job.py")),
        methods,
        args=(model,),
        compute="sleep",
        profile=profile,
        steps=args.steps,
        seeds=args.seeds,
        hosts=args.hosts,
        bandwidth=args.bandwidth,
        out=out,
    )
    for row in result.rows:
        if row["error"]:
            print(f"| {model} | {row['name']} | {row['error']} |")
            continue
        here = profile.compute_s / row["step_s"]
        published = PUBLISHED[model].get(row["name"])
        there = published / (16 * ONE_GPU[model]) if published else None
        times = [f"{row['step_s'] * 1e3:.0f} ± {row['step_s_spread'] * 1e3:.0f}"]
        times += [f"{profile.compute_s * 1e3:.0f}", f"{row['bound_s'] * 1e3:.0f}" if row["bound_s"] else ""]
        cells = [model, row["name"], *times, f"{here:.3f}"]
        cells += [f"{there:.3f}", f"{here - there:+.3f}"] if there else ["", ""]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
