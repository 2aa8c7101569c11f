"""Loops that would train wrong: one error for each, with its remedy, for all modes."""

from __future__ import annotations

from weft.errors import LoopError


def sparse_gradient(name: str) -> LoopError:
    return LoopError(f"{name} has a sparse gradient, which cannot be exchanged; build its layer with sparse=False")


def graph_of_gradients() -> LoopError:
    return LoopError("backward(create_graph=True) cannot be distributed; use torch.autograd.grad for the inner one")


def unused_parameter(name: str, step: int) -> LoopError:
    return LoopError(
        f"{name} had no gradient at step {step + 1}, though all parameters had one before; pass unused=True to "
        "run.distribute() where parameters come and go"
    )


def only_accumulated() -> LoopError:
    return LoopError("step() after a backward inside accumulate() alone; leave the last backward outside of it")


def stepped_without_backward() -> LoopError:
    return LoopError(
        "step() without a backward, and this process carries several workers, whose passes end with their backward; "
        "call loss.backward() before every step, or give each worker a process"
    )


def stepped_shared_model() -> LoopError:
    return LoopError(
        "step() inside run.merged() or run.evaluate() would change the model that all workers share; step outside of it"
    )


def closure() -> LoopError:
    return LoopError(
        "the optimizer evaluated its closure twice in a step, and would judge by one worker's loss alone; use an "
        "optimizer that evaluates it once"
    )


def no_batch() -> LoopError:
    return LoopError(
        "the first step has used no batch of run.shard(), so every worker may train on the same data; loop over "
        'run.shard(loader), or say weft.init(data="own") where the loop deals different data to the workers by itself'
    )


def stepped_early() -> LoopError:
    return LoopError(
        "optimizer.step() before run.distribute(model, optimizer): each worker would train a model of its own; call "
        "run.distribute() before the loop"
    )


def reduced_early(synchrony: str) -> LoopError:
    return LoopError(
        f"figures can be reduced only after the last step under {synchrony}, where workers do not wait for each other; "
        "evaluate after the loop, and bound it with run.epochs(N) or --steps"
    )


def reduced_between_passes() -> LoopError:
    return LoopError(
        "figures were reduced within a step, and the processes carry different numbers of workers; reduce after "
        "optimizer.step() under a condition on run.step, after the epoch, or start a process for each worker"
    )


def pending_update(name: str, schedule: str) -> LoopError:
    return LoopError(
        f"{name} has a new gradient while its last update is pending: backward ran twice before step(), or torch.func "
        f"did not wait; under {schedule} put all but the last backward into `with run.accumulate():`, or use the "
        "schedule fused"
    )


def sent_twice(compression: str) -> LoopError:
    return LoopError(
        f"backward ran twice before step() under {compression}, which would send the first gradient again; put all but "
        "the last backward into `with run.accumulate():`"
    )


def pushed_twice() -> LoopError:
    return LoopError(
        "backward ran twice before step(), and the first gradient was pushed already; put all but the last backward "
        "into `with run.accumulate():`"
    )


def set_by_hand(name: str) -> LoopError:
    return LoopError(
        f"step() without a backward, and {name} has a gradient: it was set by hand, and the other workers do not have "
        "it; call loss.backward(), which exchanges gradients"
    )


def uncleared_before_pass() -> LoopError:
    return LoopError(
        "gradients of an earlier step are still there, and this process carries several workers; call "
        "optimizer.zero_grad() in every step"
    )


def uncleared_after_push() -> LoopError:
    return LoopError(
        "backward adds to the gradients of the step before, which the servers have; call optimizer.zero_grad() in "
        "every step"
    )


def unfrozen(name: str) -> LoopError:
    return LoopError(f"{name} was frozen at run.distribute() and trains now; unfreeze it before that call")


def changed_after_push(name: str) -> LoopError:
    return LoopError(
        f"the gradient of {name} was replaced or removed between backward() and step(), and the servers have it "
        "already; freeze a parameter with requires_grad_(False) before forward, or use another topology, such as direct"
    )


def pushed_gradient_read() -> LoopError:
    return LoopError(
        "a gradient was used after it was pushed to the servers, where it becomes part of the mean; clipping and "
        "scaling between backward() and step() are not possible with servers"
    )


def options_changed_after_push() -> LoopError:
    return LoopError(
        "the optimizer's options have changed between backward() and step(), and the servers have stepped with the old "
        "ones; change them (a scheduler's step()) after step()"
    )


def no_clipping_with_servers() -> LoopError:
    return LoopError("run.clip() needs the mean of all gradients, which only the servers have; leave it out there")


def loaded_after_start() -> LoopError:
    return LoopError(
        "the servers have the optimizer's state, and do not see a state that is loaded here; load it before "
        "run.distribute(), or resume from a checkpoint of Weft's"
    )
