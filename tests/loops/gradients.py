"""Training loops as people write them: backward and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.loops.common import MLP, OUTPUTS, State, begin, fit, loader, loop, mse, sgd, state, update
from tests.loops.ground import Ground


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
