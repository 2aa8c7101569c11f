"""The bundled jobs without weft: their sizes, their data, and their models learn in a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from weft import jobs
from weft.jobs import _common, text, vision, wide

JOBS = (text, wide, vision)


@pytest.fixture(autouse=True)
def one_seeded_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def optimizer_of(job: ModuleType, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if job is text:
        return torch.optim.AdamW(model.parameters(), lr=lr)
    return torch.optim.SGD(vision.groups(model), lr=lr, momentum=0.9)


def test_every_job_is_found_by_name() -> None:
    assert jobs.names() == ("text", "vision", "wide")
    for job in JOBS:
        name = job.__name__.rpartition(".")[2]
        assert str(jobs.path(name)) == job.__file__
    assert jobs.path("_common") is None
    assert jobs.path("nothing") is None


@pytest.mark.parametrize(
    ("job", "size", "parameters"),
    [
        (text, "tiny", 0.1e6),
        (text, "2m", 2e6),
        (text, "10m", 10.6e6),
        (text, "350m", 303e6),
        (wide, "1m", 1e6),
        (wide, "25m", 25e6),
        (vision, "8", 78e3),
        (vision, "20", 272e3),
    ],
)
def test_a_size_has_as_many_parameters_as_it_says(job: ModuleType, size: str, parameters: float) -> None:
    with torch.device("meta"):
        model = job.build(size)
    tolerance = 0.1 if size == "tiny" else 0.03
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=tolerance)


@pytest.mark.parametrize("job", JOBS)
def test_an_unknown_size_is_refused_with_the_known_ones(job: ModuleType) -> None:
    with pytest.raises(ValueError, match="no size 'huge'; choose one of tiny, "):
        job.build("huge")
    with pytest.raises(ValueError, match="no size 'huge'"):
        job.data("huge", 0)


@pytest.mark.parametrize("job", JOBS)
def test_the_same_seed_gives_the_same_data(job: ModuleType) -> None:
    for first, second in zip(job.data("tiny", 3), job.data("tiny", 3), strict=True):
        assert len(first) == len(second) > 0
        for index in (0, len(first) // 2, len(first) - 1):
            for a, b in zip(first[index], second[index], strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("job", [wide, vision])
def test_another_seed_gives_other_data(job: ModuleType) -> None:
    assert not torch.equal(job.data("tiny", 0)[0][0][0], job.data("tiny", 1)[0][0][0])


@pytest.mark.parametrize("job", JOBS)
def test_data_leaves_the_global_random_numbers_alone(job: ModuleType) -> None:
    before = torch.get_rng_state()
    job.data("tiny", 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_text_is_ascii_and_windows_predict_the_next_character() -> None:
    tokens = text.corpus()
    assert int(tokens.max()) < text.VOCABULARY
    assert 1_000_000 < len(tokens) <= text.CORPUS_BYTES
    train, held_out = text.data("tiny", 0)
    assert len(held_out) == pytest.approx(0.05 * (len(train) + len(held_out)), rel=0.01)
    x, y = train[len(train) - 1]
    assert x.shape == y.shape == (32,)
    assert torch.equal(x[1:], y[:-1])


def test_text_does_not_look_ahead() -> None:
    model, tokens = text.build("tiny"), torch.randint(text.VOCABULARY, (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = 0
    assert torch.allclose(model(tokens)[:, :20], model(changed)[:, :20], atol=1e-5)


def test_text_ties_its_head() -> None:
    model = text.build("tiny")
    assert model.head.weight is model.token.weight


def test_vision_decays_weights_only() -> None:
    model = vision.build("tiny")
    weights, others = vision.groups(model)
    sizes = [len(list(group["params"])) for group in (weights, others)]  # type: ignore[call-overload]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert sizes == [len(list(model.parameters())) - sizes[1], 2 * len(norms) + 1]
    assert (weights["weight_decay"], others["weight_decay"]) == (5e-4, 0.0)


def test_vision_shows_every_class() -> None:
    train, _ = vision.data("tiny", 0)
    assert set(train.tensors[1].tolist()) == set(range(vision.CLASSES))


def test_the_schedule_warms_up_falls_and_stays() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = _common.warmup_cosine(optimizer, 20)
    rates = []
    for _ in range(25):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[20:] == pytest.approx([0.1] * 5)


def test_evaluation_repeats_itself_and_changes_nothing() -> None:
    model = vision.build("tiny")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, held_out = vision.data("tiny", 0)
    first, second = (_common.evaluate(model, held_out, torch.device("cpu")) for _ in range(2))
    assert first == second
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("job", "at_most"), [(text, 0.75), (wide, 0.85), (vision, 0.75)])
def test_a_tiny_model_learns(job: ModuleType, at_most: float) -> None:
    """Sixty steps lower the held-out loss to `at_most` of what it was."""
    size, model = job.SIZES["tiny"], job.build("tiny")
    train, held_out = job.data("tiny", 0)

    def loss_now() -> float:
        return _common.evaluate(model, held_out, torch.device("cpu"), batches=20)[0]

    before, steps = loss_now(), 0
    optimizer = optimizer_of(job, model, size.lr)
    scheduler = _common.warmup_cosine(optimizer, 60)
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(train, size.batch, shuffle=True, drop_last=True)
    while steps < 60:
        for x, y in loader:
            _common.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            steps += 1
            if steps == 60:
                break
    assert loss_now() < at_most * before
