"""A step against DistributedDataParallel's where links cost nothing: many cores, plain processes, loopback.

    python bench/fast_links.py --job text --size 2m --hosts 4 --rounds 4 --steps 40
    python bench/fast_links.py --job wide --hosts 8
    python bench/fast_links.py --job text --size 2m --launcher torchrun --only default

Contenders are interleaved, and every other round is in reverse order. `ddp` runs twice in each round: where it differs
from itself by more than 1.5 %, nothing is measurable. Each ratio is the median over rounds of a contender's median step
by `ddp`'s of the same round. Computing is real.

Launchers: `weft` starts a run as `weft compare` does, with each process's share of the cores; `fork` does the same with
processes that are forked from one in which torch is loaded, which saves most of the time outside of the steps;
`torchrun` is left to set OMP_NUM_THREADS by itself; `plain` starts processes with nothing but RANK and WORLD_SIZE, and
OMP_NUM_THREADS unset.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from weft.lab import child, trial
from weft.lab.cluster import Loopback
from weft.lab.contender import WARMUP, Contender, Task
from weft.runtime.launch.launcher import find_job
from weft.strategy import Strategy

OURS = {
    "default": "bsp / direct",
    "ring": "bsp / ring",
    "priority": "bsp / direct / priority",
    "mg_wfbp": "bsp / ring / mg_wfbp",
}
PRELOADED = ("weft.runtime.run", "torch._dynamo", "torch.nn.parallel", "weft.lab.peers", "weft.lab.instruments.sleep")
PEERS = {"ddp": "ddp", "ddp again": "ddp", "ddp-tuned": "ddp-tuned"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--job", default="text")
    parser.add_argument("--size", default="")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--launcher", choices=("weft", "fork", "torchrun", "plain"), default="weft")
    parser.add_argument(
        "--only", nargs="*", default=list(OURS), help="of our contenders; a strategy may be spelled out"
    )
    parser.add_argument("--peers", nargs="*", default=["ddp", "ddp again"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for module in PRELOADED:  # once, for all that are forked
        importlib.import_module(module)
    contenders = [Contender(name=name, strategy=Strategy.parse(OURS.get(name, name))) for name in options.only]
    contenders += [Contender(name=name, peer=PEERS[name]) for name in options.peers]
    args = ("--size", options.size) if options.size else ()
    task = Task(job=options.job, args=args, steps=options.steps + WARMUP)
    rows: dict[str, list[list[float]]] = {contender.name: [] for contender in contenders}
    cpu: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}
    exposed: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(options.rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                steps, share = once(task, contender, number, out, options.hosts, options.launcher)
                exposed[contender.name] += [event["exposed_s"] for event in events_of(out)[WARMUP:]]
            rows[contender.name].append(steps)
            cpu[contender.name].append(share)
            print(f"round {number} {contender.name}: {1e3 * statistics.median(steps):.1f} ms", file=sys.stderr)
    table(options, rows, cpu, exposed)


def events_of(out: Path) -> list[dict[str, float]]:
    """The steps of process 0."""
    return [json.loads(line) for line in (out / "events-0.jsonl").read_text(encoding="utf-8").splitlines()]


def once(
    task: Task, contender: Contender, seed: int, out: Path, hosts: int, launcher: str
) -> tuple[list[float], tuple[float, float]]:
    """Step times after warm-up, and the machine's share of time that was busy and that was stolen."""
    if launcher == "weft":
        sample = trial.run(task, Loopback(hosts), contender, seed, out, hosts=hosts)
        return sample.steps_s, (sample.cpu_share, sample.steal_share)
    before = _ticks()
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"WEFT_OUT": str(out), "WEFT_STEPS": str(task.steps), "WEFT_SEED": str(seed), "WEFT_SAVE_EVERY": "0"}
    env |= {"WEFT_PEER": contender.peer} if contender.peer else {"WEFT_CLI_STRATEGY": str(contender.strategy)}
    env["WEFT_DEVICE"] = "cpu"
    words = ["-m", child.MODULE, str(find_job(task.job)), *task.args]
    if launcher == "torchrun":
        failed = wait(
            [start(["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={hosts}", *words], env)]
        )
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        env |= {"WORLD_SIZE": str(hosts), "LOCAL_WORLD_SIZE": str(hosts)}
        places = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(hosts)]
        one = functools.partial(fork, threads=Loopback(hosts).threads) if launcher == "fork" else start
        failed = wait([one(words, place) for place in places])
    if failed:
        sys.exit(f"{contender.name} failed")
    spent = [after - earlier for after, earlier in zip(_ticks(), before, strict=True)]
    return [event["step_s"] for event in events_of(out)][WARMUP:], (spent[0] / spent[2], spent[1] / spent[2])


def start(words: list[str], env: dict[str, str]) -> int:
    """A Python process; returns its id."""
    return subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.DEVNULL).pid


def fork(words: list[str], env: dict[str, str], threads: int) -> int:
    """The same as a copy of this process, in which no operator has run yet."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.clear()
    os.environ.update(env)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(threads)
    sys.argv = words[1:]
    try:
        importlib.import_module(words[1]).main()
        os._exit(0)
    finally:
        os._exit(1)


def wait(pids: list[int]) -> bool:
    """Whether one of these processes failed."""
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    return any(codes)


def _ticks() -> tuple[int, int, int]:
    """Busy, stolen and all ticks of the whole machine."""
    user, nice, system, idle, waiting, hard, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy = user + nice + system + hard + soft
    return busy, steal, busy + idle + waiting + steal


def table(
    options: argparse.Namespace,
    rows: dict[str, list[list[float]]],
    cpu: dict[str, list[tuple[float, float]]],
    exposed: dict[str, list[float]],
) -> None:
    cores = len(os.sched_getaffinity(0))
    threads = {"torchrun": 1, "plain": cores}.get(options.launcher, max(1, cores // options.hosts))
    print(f"{options.job} {options.size}: {options.hosts} processes of {threads} threads on {cores} cores, ", end="")
    print(f"{options.launcher}, {options.rounds} rounds of {options.steps} steps, real compute")
    print(f"{'':24} {'step ms':>8} {'quartiles':>15} {'x ddp':>7} {'of each round':>26} ", end="")
    print(f"{'exposed ms':>10} {'cpu %':>6} {'steal %':>7}")
    result = {}
    base = [statistics.median(steps) for steps in rows["ddp"]]
    for name, rounds in rows.items():
        every = sorted(step for steps in rounds for step in steps)
        low, middle, high = statistics.quantiles(every, n=4)
        ratios = [statistics.median(steps) / ddp for steps, ddp in zip(rounds, base, strict=True)]
        share, steal = (statistics.mean(pair[at] for pair in cpu[name]) for at in (0, 1))
        waited = "" if name in PEERS else f"{1e3 * statistics.median(exposed[name]):.1f}"
        each = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{name:24} {1e3 * middle:8.1f} {1e3 * low:7.1f} {1e3 * high:7.1f} ", end="")
        print(f"{statistics.median(ratios):7.3f} {each:>26} {waited:>10} {100 * share:6.1f} {100 * steal:7.2f}")
        result[name] = {"step_s": middle, "quartiles_s": [low, high], "ratios": ratios, "cpu": share, "steal": steal}
    again = statistics.median(result["ddp again"]["ratios"]) if "ddp again" in result else 1.0
    print(f"ddp against itself: {again:.3f}" + ("; not measurable here" if abs(again - 1) > 0.015 else ""))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
