"""Refuses changes of server-owned state by a worker's loop: servers do not see them and would overwrite them.

From `run.distribute()` on, servers own the parameters, the optimizer's groups and its state. `ServerOwned` detects
changes by the loop. An in-place edit changes the parameter's version counter; edits through `.data` do so too while
parameters are watched, since `.data` then shares the counter. New memory has another address. Changes without either
trace (through a numpy view) are detected by a hash, from time to time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import LoopError
from weft.runtime.checks.replicas import HASH_EVERY, parameter_hash


class ServerOwned:
    """A model and an optimizer as the servers have them."""

    def __init__(self, model: nn.Module, named: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        self._named, self._optimizer = named, optimizer
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._state: dict[Any, Any] = optimizer.state
        self._away = _Away()
        self._hash: int | None = None

    def watch(self) -> None:
        """Start watching: the servers have everything, and no change is allowed from now on."""
        self._groups = _groups(self._optimizer)
        self._seen = {name: (p._version, p.data_ptr()) for name, p in self._named.items()}
        self._state = self._optimizer.state
        self._hide()
        self._optimizer.register_state_dict_pre_hook(lambda _: self._show())
        self._optimizer.register_state_dict_post_hook(lambda *_: self._hide())
        _count_edits(self._named)

    def unwatch(self) -> None:
        """Stop watching, at the end of the run."""
        _count_edits_no_more(self._named)

    def _show(self) -> None:
        self._optimizer.state = self._state  # type: ignore[assignment]

    def _hide(self) -> None:
        self._optimizer.state = self._away

    def due(self, step: int) -> bool:
        """Whether values are hashed after this step."""
        return step % HASH_EVERY == 0

    def hash(self, step: int) -> None:
        """Hash the parameters after a step, if it is due; they have the servers' values by then."""
        self._hash = parameter_hash(list(self._named.values())) if self.due(step) else None

    def check(self) -> None:
        """Raise LoopError if the loop has changed server-owned state."""
        for name, p in self._named.items():
            if (p._version, p.data_ptr()) != self._seen[name]:
                raise _changed(name)
        if self._hash is not None and parameter_hash(list(self._named.values())) != self._hash:
            raise _changed("a parameter")
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        if _groups(self._optimizer) != self._groups:
            raise LoopError(
                "the optimizer has other parameters than in run.distribute(), but the servers step the old ones; give "
                "it all of them before run.distribute(), or use another topology, such as direct"
            )
        thawed = next((name for name, p in self._frozen.items() if p.requires_grad), None)
        if thawed is not None:
            raise LoopError(
                f"{thawed} was frozen in run.distribute(), so the servers do not have it; unfreeze all parameters that "
                "will train before run.distribute(..., unused=True), and freeze them after it"
            )
        if self._optimizer.state is not self._away:
            raise _changed("the optimizer's state")


def _changed(what: str) -> LoopError:
    return LoopError(
        f"{what} was changed outside of the optimizer, but the servers have the model and do not see it; change it "
        "before run.distribute(), or use another topology, such as direct"
    )


def _groups(optimizer: Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


class _Away(defaultdict[Any, Any]):
    """Optimizer state that is on the servers: reading it here would give old values, writing would be lost."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise LoopError(
            "the servers have the optimizer's state; read it with optimizer.state_dict(), and change it before "
            "run.distribute(), or use another topology, such as direct"
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = keys = values = items = clear = pop = popitem = setdefault = update = copy = _refuse


# --- edits through `.data` --------------------------------------------------------------------------------------------

_DATA = Tensor.data
_counted: set[int] = set()


def _get(p: Tensor) -> Tensor:
    return p.detach() if id(p) in _counted else _DATA.__get__(p)  # type: ignore[attr-defined]


def _set(p: Tensor, value: Tensor) -> None:
    _DATA.__set__(p, value)  # type: ignore[attr-defined]


def _count_edits(named: Mapping[str, Tensor]) -> None:
    """From now on `.data` of these parameters shares their version counter, as `detach()` does."""
    _counted.update(map(id, named.values()))
    nn.Parameter.data = property(_get, _set)  # type: ignore[assignment]


def _count_edits_no_more(named: Mapping[str, Tensor]) -> None:
    _counted.difference_update(map(id, named.values()))
    if not _counted and "data" in vars(nn.Parameter):
        del nn.Parameter.data
