"""The checks of `weft doctor`. Each check is a function; none leaves a file, a port or a process behind."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from weft.environment import LocalLauncher
from weft.lazy import torch
from weft.runtime.launch.process_groups import die_with_launcher
from weft.runtime.launch.world import World
from weft.units import bytes_text

_MEET_S = 20.0
_COMMAND_S = 5.0
_ROOM_BYTES = 2**30
_SHARED_BYTES = 2**28

_UNSHARE = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) != 0)"
"""CLONE_NEWUSER and CLONE_NEWNET; must run in a process without threads, and importing torch starts some."""


@dataclass(frozen=True)
class Check:
    """The result of one check: its name, whether it passed, the finding, and the remedy if it failed."""

    check: str
    ok: bool
    found: str
    remedy: str = ""
    required: bool = True
    """Whether training needs it. A failed optional check does not make the machine unfit."""

    def __post_init__(self) -> None:
        assert self.ok == (not self.remedy), "a remedy if and only if the check failed"


def run_checks() -> list[Check]:
    """Run all checks; later ones depend on earlier ones."""
    return [each() for each in CHECKS]


# --- required checks ------------------------------------------------------------------------------------------------


def python() -> Check:
    ok = tuple(sys.version_info[:2]) >= (3, 11)
    return Check("Python", ok, platform.python_version(), "" if ok else "install Python 3.11 or newer")


def pytorch() -> Check:
    ok = (2, 11) <= tuple(int(part) for part in torch.__version__.split(".")[:2]) < (3,)
    return Check("PyTorch", ok, torch.__version__, "" if ok else 'pip install "torch>=2.11,<3"')


def gloo() -> Check:
    ok = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    remedy = "" if ok else "install a PyTorch build with Gloo, such as the ones on pytorch.org"
    return Check("Gloo", ok, "available" if ok else "not in this PyTorch", remedy)


def gpus() -> Check:
    """GPUs are optional, but a GPU that PyTorch cannot use is reported."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            names = [torch.cuda.get_device_name(each) for each in range(_gpus())]
        problem = str(said[0].message).splitlines()[0] if said else ""
    except RuntimeError as error:
        names, problem = [], str(error).splitlines()[0]
    if names:
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Check("CUDA GPUs", True, kinds, required=False)
    found = "none; training runs on CPU"
    if problem or Path("/dev/nvidia0").exists():
        found = f"a driver, but no GPU that PyTorch can use ({problem or 'this PyTorch is a build without CUDA'})"
        return Check("CUDA GPUs", False, found, "install the PyTorch build for this driver's CUDA", required=False)
    return Check("CUDA GPUs", True, found, required=False)


def nccl() -> Check:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # already reported by the check of GPUs
        count = _gpus()
    if not count:
        return Check("NCCL", True, "not needed without GPUs", required=False)
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return Check("NCCL", True, ".".join(str(part) for part in torch.cuda.nccl.version()))
    return Check("NCCL", False, "not in this PyTorch", "install a PyTorch build with NCCL, or train with --device cpu")


def _gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def disk() -> Check:
    """Free space where `weft train` puts its run folders."""
    place = Path("runs") if Path("runs").is_dir() else Path()
    try:
        free = shutil.disk_usage(place).free
        found = f"{bytes_text(free)} free in {place.absolute()}"
    except OSError as error:
        return Check("disk for runs/", False, f"none: {error.strerror}", "change to a folder that exists")
    if not os.access(place, os.W_OK | os.X_OK):
        return Check("disk for runs/", False, f"{found}, not writable", "work in another folder, or train with --out")
    remedy = "" if free >= _ROOM_BYTES else "make room for 1 GiB, or put runs elsewhere with --out"
    return Check("disk for runs/", not remedy, found, remedy)


def port() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            place = server.getsockname()
            with socket.create_connection(place, timeout=_COMMAND_S):
                return Check("port on loopback", True, f"{place[0]}:{place[1]} is free and answers")
    except OSError as error:
        remedy = "bring loopback up: `ip link set lo up`, as root"
        return Check("port on loopback", False, f"none that answers: {error.strerror or error}", remedy)


def meeting() -> Check:
    """Two processes all-reduce over Gloo on loopback, with the same rendezvous as two workers of a run."""
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            problem = _meet(str(Path(folder) / "store"))
    except OSError as error:
        remedy = "set TMPDIR to a writable folder"
        return Check("two processes meet", False, f"no temporary folder: {error.strerror or error}", remedy)
    if not problem:
        return Check("two processes meet", True, f"over Gloo, in {time.monotonic() - began:.1f} s including start-up")
    remedy = "allow local TCP connections on loopback (firewall, sandbox)"
    return Check("two processes meet", False, problem, remedy)


def _meet(store: str) -> str:
    """The error message; empty if both succeeded."""
    code = "import sys; from weft.cli._checks import meet; meet(int(sys.argv[1]), sys.argv[2])"
    env = os.environ | LocalLauncher(pid=os.getpid()).to_env() | {"OMP_NUM_THREADS": "1"}
    until = time.monotonic() + _MEET_S
    pair = []
    try:
        for rank in (0, 1):
            command = [sys.executable, "-c", code, str(rank), store]
            pair.append(
                subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=PIPE)
            )
        said = [each.communicate(timeout=max(0.1, until - time.monotonic()))[1] for each in pair]
    except subprocess.TimeoutExpired:
        return f"no connection within {_MEET_S:.0f} s"
    finally:
        for each in pair:
            each.kill()
            each.communicate()
    failed = [text for text, each in zip(said, pair, strict=True) if each.returncode]
    last = failed[0].decode(errors="replace").strip().rpartition("\n")[2] if failed else ""
    return last or ("one of the processes died" if failed else "")


def meet(rank: int, store: str) -> None:
    """The body of each of the two processes."""
    die_with_launcher()
    World(process=rank, processes=2, local_process=rank, workers=2, store=store).connect(torch.device("cpu"), _MEET_S)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    assert total.item() == 2, "the sum of 1 and 1 is not 2"
    torch.distributed.destroy_process_group()


# --- optional checks ------------------------------------------------------------------------------------------------


def compiler() -> Check:
    for name in ("g++", "clang++"):
        if path := shutil.which(name):
            return Check("C++ compiler", True, _first_line([path, "--version"]) or path, required=False)
    remedy = "install g++ or clang++; until then slower plain PyTorch code is used"
    return Check("C++ compiler", False, "neither g++ nor clang++", remedy, required=False)


def namespaces() -> Check:
    """Network namespaces, in which the lab shapes links."""
    name, fallback = "network namespaces without root", "without them the lab falls back to loopback"
    if sys.platform != "linux":
        return Check(name, False, "only Linux has them", fallback, required=False)
    command = [sys.executable, "-c", _UNSHARE]
    if tool := shutil.which("unshare"):
        command = [tool, "--user", "--map-root-user", "--net", "true"]
    if _first_line(command) is not None:
        return Check(name, True, "available", required=False)
    return Check(name, False, "refused", f"{_namespace_remedy()}; {fallback}", required=False)


def _namespace_remedy() -> str:
    """The kernel setting that forbids namespaces, or else advice for containers."""
    switches = {
        "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
        "kernel.unprivileged_userns_clone": ("0", "1"),
        "user.max_user_namespaces": ("0", "15000"),
    }
    for switch, (refuses, allows) in switches.items():
        file = Path("/proc/sys") / switch.replace(".", "/")
        if file.exists() and file.read_text().strip() == refuses:
            return f"as root: sysctl -w {switch}={allows}"
    return "in a container: start it with --security-opt seccomp=unconfined"


def shared_memory() -> Check:
    """Shared memory, which the processes of data loaders and NCCL use to pass tensors."""
    place = Path("/dev/shm")
    if not place.is_dir():
        remedy = "" if sys.platform != "linux" else "mount a tmpfs on /dev/shm"
        return Check("/dev/shm", not remedy, "not there", remedy, required=False)
    total, _, free = shutil.disk_usage(place)
    remedy = "" if free >= _SHARED_BYTES else "in a container: start it with --shm-size=1g"
    return Check("/dev/shm", not remedy, f"{bytes_text(free)} free of {bytes_text(total)}", remedy, required=False)


def cores() -> Check:
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS")
    too_many = wanted is not None and wanted.isdigit() and int(wanted) > count
    found = f"{count} cores, {torch.get_num_threads()} threads"
    found += ", OMP_NUM_THREADS not set" if wanted is None else f", OMP_NUM_THREADS is {wanted}"
    remedy = "unset OMP_NUM_THREADS, or set it to at most the cores of a worker" if too_many else ""
    return Check("cores and threads", not remedy, found, remedy, required=False)


def tensorboard() -> Check:
    return _extra("tensorboard", "tensorboard")


def mlflow() -> Check:
    return _extra("mlflow", "mlflow-skinny", "mlflow")


def _extra(module: str, *packages: str) -> Check:
    """Check for a package of the extra `track` without importing it."""
    if importlib.util.find_spec(module) is None:
        remedy = f"for `weft export`, run `pip install {packages[0]}`"
        return Check(module, False, "not installed", remedy, required=False)
    for package in packages:
        try:
            return Check(module, True, f"{package} {importlib.metadata.version(package)}", required=False)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check(module, True, "installed", required=False)


def _first_line(command: list[str]) -> str | None:
    """The first line of a command's output; None if it fails or times out."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout.decode(errors="replace").partition("\n")[0].strip()


CHECKS: tuple[Callable[[], Check], ...] = (
    python,
    pytorch,
    gloo,
    gpus,
    nccl,
    disk,
    port,
    meeting,
    compiler,
    namespaces,
    shared_memory,
    cores,
    tensorboard,
    mlflow,
)
