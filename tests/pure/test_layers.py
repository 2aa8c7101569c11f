"""Who may import whom, what an installation needs, and that importing does nothing else."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from weft.axis import AXES

HOME = Path(weft.__file__).parent
FILES = sorted(HOME.rglob("*.py"))

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "environment", "lazy", "native", "units", "ops", "profile", "threads", "kernels", "numerics", "jobs"),
    ("axis",),
    AXES,
    ("strategy", "rounds"),
    ("transport",),
    ("store",),
    ("runtime", "plan", "__init__"),
    ("lab", "fleet"),
    ("systems",),
    ("cli", "web"),
)
"""From the ground up. `jobs` is a list of scripts, which are users of `import weft` and nobody's import."""
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
FORBIDDEN = ("torch.distributed", "threading", "time", "socket", "ray", "subprocess", "multiprocessing", "asyncio")
"""What an answer to a question has no business with: it asks, and interpreters act."""


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever the import stands; `from a import b` counts as a and a.b."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            yield from [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]


def under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def part_of(file: Path) -> str:
    """Which part of the package a file belongs to."""
    return file.relative_to(HOME).parts[0].removesuffix(".py")


def named(file: Path) -> str:
    return str(file.relative_to(HOME))


def test_every_part_has_its_layer() -> None:
    assert {part_of(file) for file in FILES} <= set(HEIGHT)


@pytest.mark.parametrize("file", [file for file in FILES if part_of(file) in AXES], ids=named)
def test_answers_know_neither_each_other_nor_the_machine(file: Path) -> None:
    others = [f"weft.{axis}" for axis in AXES if axis != part_of(file)]
    wrong = [module for module in imports(file) if any(under(module, name) for name in [*others, *FORBIDDEN])]
    assert not wrong


@pytest.mark.parametrize("file", FILES, ids=named)
def test_layers_look_down_only(file: Path) -> None:
    if part_of(file) == "jobs":
        wrong = [module for module in imports(file) if module.startswith("weft.") and not under(module, "weft.jobs")]
        assert not wrong, "a job is written as a user would write it"
        return
    if named(file) == "__init__.py":
        return  # public names, each imported when first used
    mine = HEIGHT[part_of(file)]
    for module in imports(file):
        assert not (under(module, "weft.jobs") and module.count(".") > 1 and is_module(module)), "jobs are run by path"
        if module == "weft":
            names = [HEIGHT["__init__"]] if imports_whole(file) else []
        else:
            names = [HEIGHT[part] for part in module.split(".")[1:2] if module.startswith("weft.") and part in HEIGHT]
        assert all(height <= mine for height in names), f"{named(file)} looks up to {module}"


@pytest.mark.parametrize("file", sorted((HOME / "runtime/launch").glob("*.py")), ids=named)
def test_launching_knows_neither_modes_nor_the_engine(file: Path) -> None:
    wrong = [
        module for module in imports(file) for part in ("modes", "engine") if under(module, f"weft.runtime.{part}")
    ]
    assert not wrong


def imports_whole(file: Path) -> bool:
    """Whether a file does `import weft`, or takes a name that only the package's own file defines."""
    tree = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    for node in tree:
        if isinstance(node, ast.Import) and any(alias.name == "weft" for alias in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "weft":
            if any(alias.name not in HEIGHT for alias in node.names):
                return True
    return False


def is_module(name: str) -> bool:
    return HOME.parent.joinpath(*name.split(".")).with_suffix(".py").exists()


# --- in a process of their own --------------------------------------------------------------------------------------

NEEDED = ("torch", "numpy", "typer", "rich", "safetensors")

BLOCKED = """
import sys
allowed = set({allowed!r})

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed | sys.stdlib_module_names:
            raise ModuleNotFoundError(f"{{name}} is not installed here", name=name)

sys.meta_path.insert(0, Blocker())
import weft
import weft.cli
weft.Strategy.parse("bsp / ring / error_feedback(topk)")
weft.init, weft.compare
print(weft.__version__)
try:
    import hypothesis
except ModuleNotFoundError:
    print("blocked")
"""


def closure(names: tuple[str, ...]) -> set[str]:
    """The top-level modules of some distributions and of all that they require."""
    wanted, seen = list(names), set()
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        seen.add(name)
        wanted += [re.split(r"[\s;<>=!~\[(]", need)[0] for need in required if "extra ==" not in need]
    owners = importlib.metadata.packages_distributions()
    return {top for top, dists in owners.items() if seen & {re.sub(r"[-_.]+", "-", d).lower() for d in dists}}


def test_imports_with_the_declared_requirements_alone() -> None:
    allowed = sorted(closure(NEEDED) | {"weft", "__main__"})
    assert "hypothesis" not in allowed and "torch" in allowed
    assert python(BLOCKED.format(allowed=allowed)).split() == [weft.__version__, "blocked"]


WATCHED = """
import importlib, json, logging, os, random, signal, sys, threading
import numpy, rich.console, rich.table, torch, torch.distributed, torch.utils.data, typer  # what others do is theirs

def world():
    return {
        "threads": [len(os.listdir("/proc/self/task")), threading.active_count()],
        "files": len(os.listdir("/proc/self/fd")),
        "environment": dict(os.environ),
        "folder": [os.getcwd(), sorted(os.listdir("."))],
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "hooks": [str(sys.excepthook), str(threading.excepthook), sys.argv],
        "random": [hash(random.getstate()), int(torch.get_rng_state().sum()), str(numpy.random.get_state()[1][:9])],
        "torch": [str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(),
                  torch.distributed.is_initialized(), torch.are_deterministic_algorithms_enabled()],
        "logging": [len(logging.getLogger().handlers), logging.getLogger().level],
    }

before, changed = world(), []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    now = world()
    changed += [f"{name} changed {key}: {before[key]} -> {now[key]}" for key in now if now[key] != before[key]]
    before = now
print(json.dumps(changed))
"""


def test_importing_does_nothing_else(tmp_path: Path) -> None:
    """Neither threads nor files nor signals nor random numbers, for any module but those that are programs."""
    names = [
        ".".join(["weft", *file.relative_to(HOME).with_suffix("").parts]).removesuffix(".__init__")
        for file in FILES
        if file.name != "__main__.py" and (not file.name.startswith("cuda") or importlib.util.find_spec("triton"))
    ]
    assert "weft.runtime.run" in names
    assert json.loads(python(WATCHED, json.dumps(names), folder=tmp_path)) == []


def test_launching_does_without_torch() -> None:
    """A launcher starts quickly, and what runs before a job imports torch is ready when its launcher is killed."""
    files = sorted((HOME / "runtime/launch").glob("*.py"))
    names = [f"weft.runtime.launch.{file.stem}" for file in files if file.stem != "__init__"]
    assert "weft.runtime.launch.launcher" in names
    loaded = "import importlib, sys; list(map(importlib.import_module, sys.argv[1:])); print('torch' in sys.modules)"
    assert python(loaded, *names).split() == ["False"]


def python(code: str, *args: str, folder: Path | None = None) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
