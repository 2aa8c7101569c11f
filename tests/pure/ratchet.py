"""Limits with a list of the entries that exceed them today. The list may only shrink.

`python -m tests.pure.ratchet` lowers the entries of `ratchet.json` to their present sizes, and removes those that are
within their limit. It adds and raises nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

ALLOWED = Path(__file__).with_name("ratchet.json")

Sizes = dict[str, int]


def allowed(check: str) -> Sizes:
    found: Sizes = json.loads(ALLOWED.read_text(encoding="utf-8")).get(check, {})
    return found


def faults(check: str, sizes: Mapping[str, int], limit: int) -> list[str]:
    """A line for every entry that exceeds its limit, and for every allowance that nobody needs."""
    known = allowed(check)
    over = {name: size for name, size in sizes.items() if size > known.get(name, limit)}
    found = [f"{check}: {name} is {size}, at most {known.get(name, limit)}" for name, size in sorted(over.items())]
    idle = [name for name in known if sizes.get(name, 0) <= limit]
    if idle:
        found.append(f"{check}: within the limit now, run `python -m tests.pure.ratchet`: {', '.join(sorted(idle))}")
    return found


def shrunk(known: Sizes, sizes: Mapping[str, int], limit: int) -> Sizes:
    """The allowances that are still needed, none above its present size."""
    lower = {name: min(size, sizes.get(name, 0)) for name, size in known.items()}
    return {name: size for name, size in sorted(lower.items()) if size > limit}


def main() -> None:
    from tests.pure import test_shape, test_vocabulary

    known: dict[str, Sizes] = json.loads(ALLOWED.read_text(encoding="utf-8"))
    checks = {**test_shape.CHECKS, **test_vocabulary.CHECKS}
    kept = {check: shrunk(known.get(check, {}), sizes(), limit) for check, (limit, sizes) in checks.items()}
    ALLOWED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
