"""Training loops as people write them: models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, TensorDataset

from tests.loops.common import (
    BATCH,
    INPUTS,
    MLP,
    OUTPUTS,
    State,
    begin,
    data,
    fit,
    generator,
    loader,
    loop,
    mse,
    seed,
    sgd,
    state,
    update,
)
from tests.loops.ground import Ground


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
