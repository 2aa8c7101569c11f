"""Training loops as people write them, each with the three lines that distribute it.

A loop takes a ground, plain PyTorch or a weft run, and returns tensors that have to be the same on both. Sizes are
small and numbers are float64, so that one wrong gradient shows. Left out, because they are local by definition, as
under DistributedDataParallel: batch normalization, a buffer that forward changes in place, and hooks that clamp a
gradient before it is averaged.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, get_worker_info

from tests.loops.ground import Ground

INPUTS, OUTPUTS, BATCH = 6, 3, 3

State = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
LOOPS: dict[str, Callable[[Ground], State]] = {}
TOLERANCES = {"bf16": 0.05, "mixed_dtypes": 0.05, "autocast_scaler": 0.02}
"""Relative to the largest element, where it is more than 1e-9: these loops round to few bits, in another order."""


def loop(function: Callable[[Ground], State]) -> Callable[[Ground], State]:
    """Add a loop to the table."""
    LOOPS[function.__name__] = function
    return function


# --- what loops share -------------------------------------------------------------------------------------------------


def seed() -> None:
    """Start the global generator afresh, for weights that are the same everywhere."""
    torch.manual_seed(11)


def generator(number: int) -> torch.Generator:
    """A random stream of its own."""
    return torch.Generator().manual_seed(number)


def data(steps: int, workers: int, extra: int = 0) -> TensorDataset:
    """Pairs for so many joined batches, and some more."""
    count, stream = steps * workers * BATCH + extra, generator(5)
    return TensorDataset(torch.randn(count, INPUTS, generator=stream), torch.randn(count, OUTPUTS, generator=stream))


def loader(ground: Ground, steps: int = 6, extra: int = 0) -> DataLoader[Any]:
    """The plain loader over `data`."""
    return DataLoader(data(steps, ground.workers, extra), batch_size=BATCH)


def batches_of(sizes: Iterable[int]) -> list[Batch]:
    """A list of batches with these sizes."""
    stream = generator(2)
    return [
        (torch.randn(size, INPUTS, generator=stream), torch.randn(size, OUTPUTS, generator=stream)) for size in sizes
    ]


def mse(output: Tensor, target: Tensor) -> Tensor:
    """The mean of squares."""
    return ((output - target) ** 2).mean()


def state(model: nn.Module, **more: Tensor) -> State:
    """A copy of the model's state, with further tensors."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()} | more


class MLP(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.a, self.b, self.c = nn.Linear(INPUTS, 7), nn.Linear(7, 7), nn.Linear(7, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    """SGD with momentum and weight decay, unless told otherwise."""
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01} | options)


def begin(ground: Ground, **options: Any) -> tuple[Any, Any]:
    """An MLP and its SGD, distributed."""
    model = MLP()
    return ground.distribute(model, sgd(model, **options))


def update(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, loss: Callable[..., Tensor] = mse) -> None:
    """The usual three lines."""
    loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def fit(
    ground: Ground,
    model: nn.Module,
    optimizer: Any,
    *,
    batches: Iterable[Any] | None = None,
    loss: Callable[..., Tensor] = mse,
    **options: Any,
) -> State:
    """The plainest loop: distribute, and update on every batch."""
    model, optimizer = ground.distribute(model, optimizer, **options)
    for x, y in ground.shard(loader(ground) if batches is None else batches):
        update(model, optimizer, x, y, loss)
    return state(model)


# --- models -----------------------------------------------------------------------------------------------------------


@loop
def plain(ground: Ground) -> State:
    """Nothing out of the ordinary."""
    model = MLP()
    return fit(ground, model, sgd(model))


class TiedEmbedding(nn.Module):
    """The embedding is the output layer too; a scalar and an empty parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.embedding, self.linear, self.out = nn.Embedding(10, 5), nn.Linear(5, 5), nn.Linear(5, 10, bias=False)
        self.out.weight = self.embedding.weight
        self.scale, self.void = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.linear(self.embedding(tokens)).mean(1)) * self.scale
        return self.out(hidden) + self.void.sum()


@loop
def tied_embedding(ground: Ground) -> State:
    """One parameter in two places."""
    count, stream = 6 * ground.workers * BATCH, generator(1)
    tokens = torch.randint(0, 10, (count, 4), generator=stream)
    pairs = TensorDataset(tokens, torch.randint(0, 10, (count,), generator=stream))
    model = TiedEmbedding()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return fit(ground, model, optimizer, batches=DataLoader(pairs, batch_size=BATCH), loss=F.cross_entropy)


class Reuse(nn.Module):
    """A layer that forward uses three times, once transposed."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.a, self.c = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(torch.tanh(self.a(x))))
        return self.c(torch.tanh(F.linear(hidden, self.a.weight.t())))


@loop
def reuse(ground: Ground) -> State:
    """A layer used several times."""
    model = Reuse()
    return fit(ground, model, sgd(model))


class Unused(nn.Module):
    """A branch that every third forward leaves out, and a layer that none uses."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.a, self.branch, self.c = nn.Linear(INPUTS, 5), nn.Linear(INPUTS, 5), nn.Linear(5, OUTPUTS)
        self.never = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x))
        if self.calls % 3 != 1:
            hidden = hidden + self.branch(x)
        self.calls += 1
        return self.c(hidden)


@loop
def unused_some(ground: Ground) -> State:
    """Parameters without a gradient in some steps."""
    model = Unused()
    return fit(ground, model, sgd(model), unused=True, batches=loader(ground, 9))


class ParameterFlow(nn.Module):
    """The weights decide which branch is taken."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.a, self.b, self.c = nn.Linear(INPUTS, 5), nn.Linear(INPUTS, 5), nn.Linear(5, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.a(x) if self.a.weight.sum() * 1e6 % 2 > 1 else self.b(x)))


@loop
def param_flow(ground: Ground) -> State:
    """Control flow that reads parameters."""
    model = ParameterFlow()
    return fit(ground, model, sgd(model), unused=True, batches=loader(ground, 8))


@loop
def freeze_mid(ground: Ground) -> State:
    """A layer is frozen in the middle."""
    model = MLP()
    model, optimizer = ground.distribute(model, sgd(model), unused=True)
    for index, (x, y) in enumerate(ground.shard(loader(ground, 8))):
        if ground.step_of(index) == 4:
            model.b.requires_grad_(False)
        update(model, optimizer, x, y)
    return state(model)


@loop
def unfreeze_mid(ground: Ground) -> State:
    """A frozen layer is trained from the middle on."""
    model = MLP()
    model.b.requires_grad_(False)
    model, optimizer = ground.distribute(model, sgd(model))
    for index, (x, y) in enumerate(ground.shard(loader(ground, 8))):
        if ground.step_of(index) == 4:
            model.b.requires_grad_(True)
        update(model, optimizer, x, y)
    return state(model)


@loop
def add_module(ground: Ground) -> State:
    """A new layer after distribute, handed to the optimizer."""
    model, optimizer = begin(ground)
    extra = None
    for index, (x, y) in enumerate(ground.shard(loader(ground, 8))):
        if ground.step_of(index) == 3 and extra is None:
            model.extra = extra = nn.Linear(INPUTS, OUTPUTS)
            stream = generator(3)
            with torch.no_grad():
                for parameter in extra.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=stream) * 0.1)
            optimizer.add_param_group({"params": list(extra.parameters())})
        mse(model(x) + (extra(x) if extra is not None else 0), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def weightnorm(ground: Ground) -> State:
    """Weight normalization and an orthogonal layer."""
    model = MLP()
    parametrizations.weight_norm(model.b)
    parametrizations.orthogonal(model.a)
    return fit(ground, model, sgd(model))


@loop
def spectral(ground: Ground) -> State:
    """Spectral normalization as a parametrization."""
    model = MLP()
    seed()
    parametrizations.spectral_norm(model.b)
    return fit(ground, model, sgd(model))


@loop
def spectral_old(ground: Ground) -> State:
    """Spectral normalization as a hook."""
    model = MLP()
    seed()
    nn.utils.spectral_norm(model.b)
    return fit(ground, model, sgd(model))


class Positive(nn.Module):
    """Weights kept positive."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x)


@loop
def parametrized(ground: Ground) -> State:
    """A parametrization of the user's own."""
    model = MLP()
    parametrize.register_parametrization(model.b, "weight", Positive())
    return fit(ground, model, sgd(model))


class Recurrent(nn.Module):
    """A bidirectional LSTM of two layers, and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.lstm = nn.LSTM(2, 4, 2, batch_first=True, bidirectional=True)
        self.gru, self.c = nn.GRU(8, 3, batch_first=True), nn.Linear(3, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.gru(self.lstm(x.view(len(x), 3, 2))[0])[0][:, -1])


@loop
def rnn(ground: Ground) -> State:
    """Recurrent layers."""
    model = Recurrent()
    return fit(ground, model, torch.optim.Adam(model.parameters(), lr=0.02))


class Complex(nn.Module):
    """A complex weight beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.w = nn.Parameter(torch.randn(INPUTS, 4, dtype=torch.complex128) * 0.3)
        self.c = nn.Linear(4, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.c((x.to(torch.complex128) @ self.w).abs())


@loop
def complex_adam(ground: Ground) -> State:
    """Complex parameters under Adam."""
    model = Complex()
    return fit(ground, model, torch.optim.Adam(model.parameters(), lr=0.02))


@loop
def complex_sgd(ground: Ground) -> State:
    """Complex parameters under SGD."""
    model = Complex()
    return fit(ground, model, sgd(model))


@loop
def bf16(ground: Ground) -> State:
    """A model of bfloat16."""
    model: Any = MLP().to(torch.bfloat16)
    model, optimizer = ground.distribute(model, sgd(model, lr=0.05, momentum=0.0, weight_decay=0.0))
    for x, y in ground.shard(loader(ground)):
        mse(model(x.bfloat16()).float(), y.float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def mixed_dtypes(ground: Ground) -> State:
    """Layers of three dtypes."""
    model = MLP()
    model.b.float()
    model.c.bfloat16()
    model, optimizer = ground.distribute(model, sgd(model, lr=0.02))
    for x, y in ground.shard(loader(ground)):
        hidden = torch.tanh(model.b(torch.tanh(model.a(x)).float())).bfloat16()
        mse(model.c(hidden).double(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


class Odd(nn.Module):
    """Parameters that are transposed, scalar, empty, and views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.transposed, self.scalar = nn.Parameter(torch.randn(5, INPUTS).t()), nn.Parameter(torch.tensor(0.7))
        self.empty, self.hollow = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(3, 0, 2))
        flat = torch.randn(5 * OUTPUTS + OUTPUTS) * 0.3
        self.w, self.bias = nn.Parameter(flat[:15].view(5, 3)), nn.Parameter(flat[15:])

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.transposed) * self.scalar
        weighted = (hidden.unsqueeze(-1) * self.w.expand(len(x), 5, 3)).sum(1)
        return weighted + self.bias + self.empty.sum() + self.hollow.sum()


@loop
def odd_params(ground: Ground) -> State:
    """Unusual parameters."""
    model = Odd()
    return fit(ground, model, sgd(model))


class Kernels(nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3), nn.Linear(16, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))).flatten(1))


def fit_kernels(ground: Ground, layout: torch.memory_format) -> State:
    """Convolutions in a memory format."""
    count, stream = 5 * ground.workers * BATCH, generator(1)
    images = torch.randn(count, 3, 6, 6, generator=stream)
    pairs = TensorDataset(images, torch.randn(count, OUTPUTS, generator=stream))
    model = Kernels().to(memory_format=layout)
    return fit(ground, model, sgd(model, lr=0.02), batches=DataLoader(pairs, batch_size=BATCH))


@loop
def convs(ground: Ground) -> State:
    """Convolutions."""
    return fit_kernels(ground, torch.contiguous_format)


@loop
def channels_last(ground: Ground) -> State:
    """Convolutions whose weights are stored channels last."""
    return fit_kernels(ground, torch.channels_last)


class MyParameter(nn.Parameter):
    """A parameter class of the user's own."""


class Subclassed(nn.Module):
    """Forward asks what class its parameter has."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.w, self.b = MyParameter(torch.randn(INPUTS, OUTPUTS) * 0.3), nn.Parameter(torch.zeros(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w * (2.0 if isinstance(self.w, MyParameter) else 1.0) + self.b


@loop
def param_subclass(ground: Ground) -> State:
    """A parameter keeps its class."""
    model = Subclassed()
    return fit(ground, model, sgd(model, lr=0.02))


@loop
def mha(ground: Ground) -> State:
    """A transformer layer, evaluated after each step by its fast path."""
    seed()
    layer = nn.TransformerEncoderLayer(INPUTS, 2, 12, dropout=0.0, batch_first=True)
    model: Any = nn.Sequential(layer, nn.Flatten(), nn.Linear(INPUTS, OUTPUTS))
    model, optimizer = ground.distribute(model, sgd(model, lr=0.05))
    inputs, targets = data(1, 4)[:]
    losses = []
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        model.train()
        update(model, optimizer, x[:, None], y)
        model.eval()
        with torch.no_grad():
            loss = mse(model(inputs[:, None]), targets).item()
        if ground.ends_step(index):
            losses.append(loss)
    return state(model, losses=torch.tensor(losses))


class Replaced(nn.Module):
    """A buffer that forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        seed()
        self.inner = MLP()
        self.register_buffer("mu", torch.zeros(INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mu = 0.9 * self.mu + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mu)


@loop
def buffer_replaced(ground: Ground) -> State:
    """A buffer is assigned anew in every forward."""
    model = Replaced()
    return fit(ground, model, sgd(model))


# --- optimizers and schedules -----------------------------------------------------------------------------------------


@loop
def groups(ground: Ground) -> State:
    """Parameter groups with settings of their own."""
    model = MLP()
    parts = [
        {"params": model.a.parameters(), "lr": 0.02},
        {"params": model.b.parameters(), "weight_decay": 0.3, "nesterov": True},
        {"params": model.c.parameters()},
    ]
    return fit(ground, model, torch.optim.SGD(parts, lr=0.1, momentum=0.9))


@loop
def add_group(ground: Ground) -> State:
    """A layer that joins the optimizer after distribute."""
    model: Any = MLP()
    optimizer: Any = torch.optim.SGD([*model.a.parameters(), *model.c.parameters()], lr=0.1, momentum=0.9)
    model, optimizer = ground.distribute(model, optimizer)
    for index, (x, y) in enumerate(ground.shard(loader(ground, 8))):
        if ground.step_of(index) == 3 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(model.b.parameters()), "lr": 0.05})
        mse(model(x), y).backward()
        optimizer.step()
        model.zero_grad()
        optimizer.zero_grad()
    return state(model)


@loop
def adam_amsgrad(ground: Ground) -> State:
    """Adam with AMSGrad and weight decay."""
    model = MLP()
    return fit(ground, model, torch.optim.Adam(model.parameters(), lr=0.02, amsgrad=True, weight_decay=0.1))


@loop
def adam_foreach(ground: Ground) -> State:
    """Adam over lists of tensors."""
    model = MLP()
    return fit(ground, model, torch.optim.Adam(model.parameters(), lr=0.02, foreach=True))


@loop
def adam_fused(ground: Ground) -> State:
    """AdamW as one kernel."""
    model = MLP()
    return fit(ground, model, torch.optim.AdamW(model.parameters(), lr=0.02, fused=True))


def fit_scheduled(ground: Ground, optimizer: Any, scheduler: Any, model: nn.Module, steps: int = 6) -> State:
    """A scheduler that steps with the optimizer."""
    model, optimizer, scheduler = ground.distribute(model, optimizer, scheduler)
    for x, y in ground.shard(loader(ground, steps)):
        mse(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return state(model)


@loop
def adam_tensor_lr(ground: Ground) -> State:
    """A learning rate that is a tensor, changed in place by a scheduler."""
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.02))
    return fit_scheduled(ground, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5), model)


@loop
def sgd_nesterov(ground: Ground) -> State:
    """SGD with Nesterov's momentum."""
    model = MLP()
    return fit(ground, model, sgd(model, nesterov=True))


@loop
def rprop(ground: Ground) -> State:
    """Rprop, which goes by the signs."""
    model = MLP()
    return fit(ground, model, torch.optim.Rprop(model.parameters(), lr=0.01))


@loop
def adafactor(ground: Ground) -> State:
    """Adafactor, whose state is factored."""
    model = MLP()
    return fit(ground, model, torch.optim.Adafactor(model.parameters(), lr=0.05))


@loop
def asgd(ground: Ground) -> State:
    """Averaged SGD."""
    model = MLP()
    return fit(ground, model, torch.optim.ASGD(model.parameters(), lr=0.05, t0=2))


@loop
def muonish(ground: Ground) -> State:
    """Muon, which takes a matrix as a whole."""
    model = nn.Sequential(nn.Linear(INPUTS, 7, bias=False), nn.Tanh(), nn.Linear(7, OUTPUTS, bias=False))
    seed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return fit(ground, model, torch.optim.Muon(model.parameters(), lr=0.05))


@loop
def lbfgs(ground: Ground) -> State:
    """L-BFGS, which calls a closure several times a step."""
    model: Any = MLP()
    model, optimizer = ground.distribute(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    for batch in ground.shard(loader(ground)):

        def closure(batch: Batch = batch) -> Tensor:
            optimizer.zero_grad()
            loss = mse(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)
    return state(model)


@loop
def sched_epoch(ground: Ground) -> State:
    """A scheduler that steps once an epoch."""
    model: Any = MLP()
    optimizer: Any = sgd(model)
    model, optimizer, scheduler = ground.distribute(model, optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5))
    for _ in range(3):
        for x, y in ground.shard(loader(ground, 3)):
            update(model, optimizer, x, y)
        scheduler.step()
    return state(model)


@loop
def sched_onecycle(ground: Ground) -> State:
    """One cycle of learning rate and momentum."""
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return fit_scheduled(ground, optimizer, lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20), model, 9)


@loop
def lr_int(ground: Ground) -> State:
    """A schedule whose numbers are whole."""
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=1, weight_decay=0.1)
    return fit_scheduled(ground, optimizer, lr_scheduler.LambdaLR(optimizer, lambda t: 1 if t < 2 else 0), model)


@loop
def lr_by_hand(ground: Ground) -> State:
    """Settings assigned before each step, whole numbers among them."""
    model, optimizer = begin(ground, lr=0.2, weight_decay=0.05)
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        step = ground.step_of(index)
        for group in optimizer.param_groups:
            group["lr"] = 0.2 if step < 2 else 0
            group["momentum"] = 0.9 if step < 1 else 0
            group["weight_decay"] = 0.05
        update(model, optimizer, x, y)
    return state(model)


@loop
def lr_decay_by_hand(ground: Ground) -> State:
    """The learning rate is multiplied after each step."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        for group in optimizer.param_groups:
            group["lr"] *= 0.7
    return state(model)


@loop
def two_opts(ground: Ground) -> State:
    """Two optimizers for two parts; the second is passed along."""
    model: Any = MLP()
    first: Any = torch.optim.SGD([*model.a.parameters(), *model.b.parameters()], lr=0.1, momentum=0.9)
    model, first, second = ground.distribute(model, first, torch.optim.Adam(model.c.parameters(), lr=0.02))
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
        first.step()
        first.zero_grad()
        second.step()
        second.zero_grad()
    return state(model)


@loop
def gan(ground: Ground) -> State:
    """Generator and discriminator by turns, with a loss and an optimizer each."""
    seed()
    model: Any = nn.ModuleDict({"g": nn.Linear(INPUTS, OUTPUTS), "d": nn.Linear(OUTPUTS, 1)})
    makers: Any = torch.optim.SGD(model["g"].parameters(), lr=0.05, momentum=0.5)
    judges: Any = torch.optim.SGD(model["d"].parameters(), lr=0.05, momentum=0.5)
    model, makers, judges = ground.distribute(model, makers, judges, unused=True)
    for x, y in ground.shard(loader(ground)):
        judges.zero_grad()
        fake, real = model["d"](model["g"](x).detach()), model["d"](y)
        (fake.mean() - real.mean() + 0.1 * (model["d"](y) ** 2).mean()).backward()
        judges.step()
        makers.zero_grad()
        (-model["d"](model["g"](x)).mean() + 0.1 * (model["g"](x) ** 2).mean()).backward()
        makers.step()
    return state(model)


@loop
def momentum_reset(ground: Ground) -> State:
    """Momentum is set to zero in the middle."""
    model, optimizer = begin(ground)
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        update(model, optimizer, x, y)
        if ground.step_of(index) == 2:
            for parameter in model.parameters():
                if "momentum_buffer" in optimizer.state[parameter]:
                    optimizer.state[parameter]["momentum_buffer"].zero_()
    return state(model)


@loop
def state_clear(ground: Ground) -> State:
    """Adam forgets its moments in the middle."""
    model: Any = MLP()
    model, optimizer = ground.distribute(model, torch.optim.Adam(model.parameters(), lr=0.02))
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        update(model, optimizer, x, y)
        if ground.step_of(index) == 2:
            optimizer.state.clear()
    return state(model)


def clip(optimizer: Any, *_: Any) -> None:
    """A hook on the optimizer's step that clips the gradients' norm."""
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)


@loop
def pre_hook_clip(ground: Ground) -> State:
    """Clipping as a hook on the step, registered before distribute."""
    model = MLP()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(clip)
    return fit(ground, model, optimizer)


@loop
def pre_hook_late(ground: Ground) -> State:
    """Clipping as a hook on the step, registered after distribute."""
    model, optimizer = begin(ground)
    optimizer.register_step_pre_hook(clip)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
    return state(model)


@loop
def step_twice(ground: Ground) -> State:
    """Two steps with one gradient."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def skip_step(ground: Ground) -> State:
    """Gradients thrown away in some steps."""
    model, optimizer = begin(ground)
    for index, (x, y) in enumerate(ground.shard(loader(ground, 8))):
        mse(model(x), y).backward()
        if ground.step_of(index) % 3 != 1:
            optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def zero_first(ground: Ground) -> State:
    """zero_grad to zeros, before forward."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        optimizer.zero_grad(set_to_none=False)
        mse(model(x), y).backward()
        optimizer.step()
    return state(model)


@loop
def zero_model(ground: Ground) -> State:
    """zero_grad of the model."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        model.zero_grad()
        mse(model(x), y).backward()
        optimizer.step()
    return state(model)


@loop
def zero_between(ground: Ground) -> State:
    """zero_grad between forward and backward."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state(model)


# --- backward and gradients -------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Activations computed again in backward."""

    def __init__(self, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.inner, self.scale = MLP(), nn.Parameter(torch.ones(OUTPUTS))
        self.reentrant, self.whole = reentrant, whole

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.clone().requires_grad_(True)
        for layer in (self.inner.a, self.inner.b):
            hidden = checkpoint(lambda z, layer=layer: torch.tanh(layer(z)), hidden, use_reentrant=self.reentrant)
        if self.whole:
            return checkpoint(lambda z: self.inner.c(z) * self.scale, hidden, use_reentrant=self.reentrant)
        return self.inner.c(hidden) * self.scale


@loop
def ckpt_non(ground: Ground) -> State:
    """Non-reentrant checkpoints."""
    model = Checkpointed(reentrant=False, whole=False)
    return fit(ground, model, sgd(model))


@loop
def ckpt_re(ground: Ground) -> State:
    """Reentrant checkpoints of two layers."""
    model = Checkpointed(reentrant=True, whole=False)
    return fit(ground, model, sgd(model))


@loop
def ckpt_re_whole(ground: Ground) -> State:
    """Reentrant checkpoints of the whole model."""
    model = Checkpointed(reentrant=True, whole=True)
    return fit(ground, model, sgd(model))


@loop
def two_backward(ground: Ground) -> State:
    """Two losses, each with a backward of its own."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        output = model(x)
        mse(output, y).backward(retain_graph=True)
        (output**4).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def two_backward_acc(ground: Ground) -> State:
    """Two losses, the first of them under accumulate."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        output = model(x)
        with ground.accumulate():
            mse(output, y).backward(retain_graph=True)
        (output**4).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def grad_penalty(ground: Ground) -> State:
    """A penalty on the gradient with respect to the input."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        leaf = x.clone().requires_grad_(True)
        output = model(leaf)
        (slope,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
        (mse(output, y) + 0.3 * (slope**2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def param_penalty(ground: Ground) -> State:
    """A penalty that is linear in the gradients with respect to parameters, and so a mean over samples."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        loss = mse(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + 0.1 * sum(grad.sum() for grad in grads)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def manual_grads(ground: Ground) -> State:
    """Gradients from torch.autograd.grad, assigned by hand."""
    model, optimizer = begin(ground)
    parameters = list(model.parameters())
    for x, y in ground.shard(loader(ground)):
        for parameter, grad in zip(parameters, torch.autograd.grad(mse(model(x), y), parameters), strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def hooks_linear(ground: Ground) -> State:
    """A tensor hook that scales, and a module's backward hook."""
    model = MLP()
    model.b.weight.register_hook(lambda grad: grad * 0.5)
    model.a.register_full_backward_hook(lambda module, given, got: None)
    return fit(ground, model, sgd(model))


def clamp(parameter: Tensor) -> None:
    """A hook that clamps an accumulated gradient."""
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.02, 0.02)


@loop
def hooks_post_acc(ground: Ground) -> State:
    """Accumulated gradients clamped by a hook, registered after distribute."""
    model, optimizer = begin(ground)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clamp)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
    return state(model)


@loop
def opt_in_backward(ground: Ground) -> State:
    """The optimizer steps in backward, one for each parameter."""
    model, _ = begin(ground)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
    return state(model)


@loop
def clip_value(ground: Ground) -> State:
    """Gradients clipped by value, then by norm."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def noise_grads(ground: Ground) -> State:
    """Something is added to the mean between backward and step."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad += 0.01 * parameter.detach().sign()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def backward_inputs(ground: Ground) -> State:
    """backward(inputs=...) for a part of the model."""
    model = MLP()
    model, optimizer = ground.distribute(model, sgd(model), unused=True)
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward(inputs=list(model.c.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def func_vmap(ground: Ground) -> State:
    """Per-sample gradients as a penalty, by torch.func."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        parameters = dict(model.named_parameters())

        def output(sample: Tensor, parameters: dict[str, Any] = parameters) -> Tensor:
            return torch.func.functional_call(model, parameters, (sample[None],)).sum()

        slopes = torch.func.vmap(torch.func.grad(output))(x)
        (mse(model(x), y) + 0.2 * (slopes**2).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def sam(ground: Ground) -> State:
    """Sharpness-aware minimization: the step's gradient is taken beside the weights."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
        with torch.no_grad():
            offsets = [0.05 * parameter.grad.clone() for parameter in model.parameters()]
            for parameter, offset in zip(model.parameters(), offsets, strict=True):
                parameter.add_(offset)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        with torch.no_grad():
            for parameter, offset in zip(model.parameters(), offsets, strict=True):
                parameter.sub_(offset)
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


def fit_scaled(ground: Ground, model: Any, forward: Callable[..., Tensor], lr: float, norm: float) -> State:
    """A GradScaler with clipping; `forward` gives the loss of a batch."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model, optimizer, scaler = ground.distribute(model, sgd(model, lr=lr), scaler)
    for x, y in ground.shard(loader(ground)):
        scaler.scale(forward(model, x, y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return state(model, scale=torch.tensor(scaler.get_scale()))


@loop
def autocast_scaler(ground: Ground) -> State:
    """Mixed precision as the tutorial has it."""

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mse(model(x.float()).float(), y.float())

    return fit_scaled(ground, MLP().float(), forward, lr=0.02, norm=0.5)


@loop
def scaler_f64(ground: Ground) -> State:
    """A GradScaler without rounding."""
    return fit_scaled(ground, MLP(), lambda model, x, y: mse(model(x), y), lr=0.05, norm=0.2)


# --- weights between steps --------------------------------------------------------------------------------------------


@loop
def ema_hand(ground: Ground) -> State:
    """A moving average of the weights, by hand."""
    model, optimizer = begin(ground)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                average[name].mul_(0.9).add_(parameter, alpha=0.1)
    return state(model, **{f"average.{name}": tensor for name, tensor in average.items()})


@loop
def ema_averaged(ground: Ground) -> State:
    """A moving average of the weights, by AveragedModel."""
    model: Any = MLP()
    average: Any = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    model, optimizer, average = ground.distribute(model, sgd(model), average)
    for x, y in ground.shard(loader(ground)):
        mse(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        optimizer.zero_grad()
    return state(model, **{f"average.{name}": tensor for name, tensor in average.state_dict().items()})


@loop
def wgan_clip(ground: Ground) -> State:
    """Weights clamped after each step, through .data."""
    model, optimizer = begin(ground, lr=0.3, weight_decay=0.0)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)
    return state(model)


@loop
def vec_to_params(ground: Ground) -> State:
    """Weights projected through one vector."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        vector = nn.utils.parameters_to_vector(model.parameters()).detach()
        nn.utils.vector_to_parameters(vector / max(1.0, vector.norm() / 2), model.parameters())
    return state(model)


@loop
def data_replaced(ground: Ground) -> State:
    """Parameters get new storage after each step."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        update(model, optimizer, x, y)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return state(model)


@loop
def deep_copies(ground: Ground) -> State:
    """A deep copy of the model after each step, before zero_grad."""
    model, optimizer = begin(ground)
    copies = []
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        mse(model(x), y).backward()
        optimizer.step()
        copied = copy.deepcopy(model)
        if ground.ends_step(index):
            copies.append(copied)
        optimizer.zero_grad()
    return state(model, **{f"{k}.{name}": t for k, each in enumerate(copies) for name, t in state(each).items()})


@loop
def eval_inside(ground: Ground) -> State:
    """An evaluation in inference mode after each step."""
    seed()
    model: Any = nn.Sequential(nn.Linear(INPUTS, 7), nn.Dropout(0.0), nn.Tanh(), nn.Linear(7, OUTPUTS))
    model, optimizer = ground.distribute(model, sgd(model))
    inputs, targets = data(1, 4)[:]
    losses = []
    for index, (x, y) in enumerate(ground.shard(loader(ground))):
        model.train()
        update(model, optimizer, x, y)
        model.eval()
        with torch.inference_mode():
            loss = mse(model(inputs), targets).item()
        if ground.ends_step(index):
            losses.append(loss)
    return state(model, losses=torch.tensor(losses))


# --- data and batches -------------------------------------------------------------------------------------------------


@loop
def last_smaller(ground: Ground) -> State:
    """The last batch is smaller, and some workers have none."""
    model = MLP()
    return fit(ground, model, sgd(model), batches=loader(ground, 4, extra=2))


@loop
def last_missing(ground: Ground) -> State:
    """The last joined batch lacks a worker's part."""
    model = MLP()
    return fit(ground, model, sgd(model), batches=loader(ground, 4, extra=3))


@loop
def tiny_data(ground: Ground) -> State:
    """Two samples in all."""
    model = MLP()
    pairs = TensorDataset(*(tensor[:2] for tensor in data(1, 1).tensors))
    return fit(ground, model, sgd(model), batches=DataLoader(pairs, batch_size=BATCH))


def fit_accumulating(ground: Ground, sizes: Iterable[int]) -> State:
    """Two micro-batches a step."""
    model, optimizer = begin(ground)
    for index, (x, y) in enumerate(ground.shard(batches_of(sizes))):
        last = ground.step_of(index) % 2 == 1
        with contextlib.nullcontext() if last else ground.accumulate():
            (mse(model(x), y) / 2).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@loop
def acc_uneven(ground: Ground) -> State:
    """Micro-batches of a step are uneven, but equal among the workers."""
    sizes = [3, 3, 1, 1, 4, 4, 2, 2, 3, 3, 5, 5] if ground.workers == 2 else [3] * 12
    return fit_accumulating(ground, sizes)


@loop
def acc_uneven2(ground: Ground) -> State:
    """Micro-batches of a step are uneven among the workers."""
    return fit_accumulating(ground, [3, 2, 1, 4] * 3)


@loop
def break_early(ground: Ground) -> State:
    """Each epoch ends before its loader does."""
    model, optimizer = begin(ground)
    for _ in range(3):
        for index, (x, y) in enumerate(ground.shard(loader(ground, 5))):
            update(model, optimizer, x, y)
            if ground.step_of(index) == 2 and ground.ends_step(index):
                break
    return state(model)


@loop
def dict_loader(ground: Ground) -> State:
    """Batches that are nested dicts and lists."""
    rows = [{"in": {"x": x}, "t": [y, torch.tensor(1.0)]} for x, y in data(6, ground.workers)]
    model, optimizer = begin(ground)
    for batch in ground.shard(DataLoader(rows, batch_size=BATCH)):
        update(model, optimizer, batch["in"]["x"], batch["t"][0])
    return state(model)


@loop
def seq_first(ground: Ground) -> State:
    """Batches (time, batch, features) of different lengths, in a list."""
    seed()
    model: Any = nn.Linear(INPUTS, OUTPUTS)
    model, optimizer = ground.distribute(model, sgd(model))
    stream, lengths = generator(2), (4, 8, 2, 6, 5, 3)
    inputs = [torch.randn(length, BATCH, INPUTS, generator=stream) for length in lengths]
    batches = [(x, torch.randn(BATCH, OUTPUTS, generator=stream)) for x in inputs]
    if ground.plain:
        for first in range(0, len(batches), ground.workers):
            group = batches[first : first + ground.workers]
            torch.cat([((model(x).mean(0) - y) ** 2).mean(1) for x, y in group]).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        for x, y in ground.shard(batches, samples=lambda batch: batch[0].shape[1]):
            mse(model(x).mean(0), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


@loop
def token_mean(ground: Ground) -> State:
    """A mean over tokens that leaves out padding."""
    seed()
    model: Any = nn.Sequential(nn.Embedding(8, 5), nn.Linear(5, 8))
    count, stream = 6 * ground.workers * BATCH, generator(2)
    tokens, targets = (torch.randint(0, 8, (count, 5), generator=stream) for _ in range(2))
    lengths = torch.randint(1, 6, (count,), generator=stream)
    targets[torch.arange(5) >= lengths[:, None]] = -100
    model, optimizer = ground.distribute(model, sgd(model))
    sentences = DataLoader(TensorDataset(tokens, targets), batch_size=BATCH)
    for x, y in ground.shard(sentences, samples=lambda batch: (batch[1] != -100).sum()):
        F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def sum_loss(ground: Ground) -> State:
    """A loss that is a sum over the batch."""
    model = MLP()
    return fit(ground, model, sgd(model, lr=0.01), loss=lambda o, y: ((o - y) ** 2).sum(), reduction="sum")


def fit_epochs(ground: Ground, batches: DataLoader[Any], epochs: int) -> State:
    """Several epochs over one loader."""
    model, optimizer = begin(ground)
    for _ in range(epochs):
        for x, y in ground.shard(batches):
            update(model, optimizer, x, y)
    return state(model)


@loop
def epochs_shuffle(ground: Ground) -> State:
    """Shuffled by a generator of the user's own."""
    pairs = data(4, ground.workers)
    return fit_epochs(ground, DataLoader(pairs, batch_size=BATCH, shuffle=True, generator=generator(9)), 3)


@loop
def loader_workers(ground: Ground) -> State:
    """Shuffled, read by two processes, with a smaller last batch."""
    pairs = data(4, ground.workers, extra=2)
    shuffled = DataLoader(pairs, batch_size=BATCH, shuffle=True, generator=generator(9), num_workers=2)
    return fit_epochs(ground, shuffled, 2)


class Stream(IterableDataset[Any]):
    """A dataset without a length."""

    def __init__(self, workers: int) -> None:
        self.pairs = data(4, workers, extra=2)

    def __iter__(self) -> Iterator[Any]:
        reader = get_worker_info()
        first, stride = (reader.id, reader.num_workers) if reader else (0, 1)
        return (self.pairs[index] for index in range(first, len(self.pairs), stride))


@loop
def iterable(ground: Ground) -> State:
    """A loader without a length."""
    model = MLP()
    return fit(ground, model, sgd(model), batches=DataLoader(Stream(ground.workers), batch_size=BATCH))


class Permuted(Sampler[int]):
    """Another order in each epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(self.count, generator=generator(self.epoch)).tolist())


@loop
def own_sampler(ground: Ground) -> State:
    """A sampler of the user's own, which counts epochs."""
    pairs = data(4, ground.workers)
    return fit_epochs(ground, DataLoader(pairs, batch_size=BATCH, sampler=Permuted(len(pairs))), 3)


class Changed(DataLoader[Any]):
    """A loader of the user's own, which changes the batches."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield x * 2, y + 1


@loop
def loader_subclass(ground: Ground) -> State:
    """A subclass of DataLoader with an __iter__ of its own."""
    model = MLP()
    return fit(ground, model, sgd(model), batches=Changed(data(6, ground.workers), batch_size=BATCH))


@loop
def reuse_batch(ground: Ground) -> State:
    """Two steps with each batch."""
    model, optimizer = begin(ground)
    for x, y in ground.shard(loader(ground)):
        for _ in range(2):
            update(model, optimizer, x, y)
    return state(model)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@loop
def compile_model(ground: Ground) -> State:
    """A compiled model."""
    model = MLP()
    compiled: Any = model if ground.plain else torch.compile(model, backend="aot_eager")
    compiled, optimizer = ground.distribute(compiled, sgd(model))
    for x, y in ground.shard(loader(ground)):
        update(compiled, optimizer, x, y)
    return state(model)


@loop
def compile_inplace(ground: Ground) -> State:
    """A model compiled in place."""
    model = MLP()
    if not ground.plain:
        model.compile(backend="aot_eager")
    return fit(ground, model, sgd(model))


@loop
def compile_fn(ground: Ground) -> State:
    """A compiled function that calls the model."""
    model, optimizer = begin(ground)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return mse(model(x), y)

    compiled = loss if ground.plain else torch.compile(loss, backend="aot_eager")
    for x, y in ground.shard(loader(ground, 8)):
        compiled(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return state(model)


@loop
def compile_part(ground: Ground) -> State:
    """One compiled layer."""
    model: Any = MLP()
    if not ground.plain:
        model.b = torch.compile(model.b, backend="aot_eager")
    trained = fit(ground, model, sgd(model), batches=loader(ground, 8))
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in trained.items()}
