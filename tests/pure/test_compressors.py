"""What compressors send is close to the gradient, whatever it is: right on average, or within the declared error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from tests.pure.laws.test_compression import Crowd, compressors, draw, exchanged, fit, specs_of
from weft import kernels
from weft.compression import Bucket, Compressor, Context, Piece, State, _coded
from weft.compression._coded import Coded
from weft.compression.powersgd import orthonormal
from weft.errors import Conflict, SpellingError, UserError
from weft.ops import Scatter, Spec
from weft.strategy import Strategy
from weft.topology.direct import Direct
from weft.transport import loopback

LARGE = specs_of(((60, 40), (7,), (31, 50)), torch.float32)
"""Parameters that are worth dividing among workers, where a round costs next to nothing."""


@pytest.fixture
def cheap_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_coded, "A_ROUND", 16)


def of(text: str) -> Any:
    return Strategy.parse(text).compression


def sent(compression: Compressor, x: Tensor, shape: tuple[int, ...], step: int = 0) -> Tensor:
    """What one worker alone sends of a gradient."""
    piece = Piece(Spec("p", shape), x.clone(), torch.full_like(x, 9))
    state: State = {}
    loopback.run([compression.exchange(Bucket((piece,)), state, Context(step=step, rank=0, workers=1))])
    return piece.mean


@pytest.fixture(params=["fast", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of encoding and decoding."""
    if request.param == "plain":
        monkeypatch.setattr(kernels, "of", lambda tensor: None)
    else:
        assert kernels.of(torch.zeros(1)) is not None, "there is a compiler, and fast paths are not used"
    return str(request.param)


# --- values -----------------------------------------------------------------------------------------------------------

SIZES = (0, 1, 7, 64, 1000, 1025)
KINDS = {
    "zero": lambda n: torch.zeros(n),
    "minus zero": lambda n: -torch.zeros(n),
    "constant": lambda n: torch.full((n,), -0.37),
    "normal": lambda n: torch.randn(n, generator=torch.Generator().manual_seed(n)),
    "tiny": lambda n: 1e-30 * torch.randn(n, generator=torch.Generator().manual_seed(n)),
    "subnormal": lambda n: 1e-42 * torch.randn(n, generator=torch.Generator().manual_seed(n)),
    "huge": lambda n: 1e30 * torch.randn(n, generator=torch.Generator().manual_seed(n)),
    "one alone": lambda n: torch.cat([torch.ones(min(n, 1)), torch.zeros(max(0, n - 1))]),
    "both ends": lambda n: torch.where(torch.arange(n) % 2 == 0, 1e-20, 1e20),
}


@compressors
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_within_what_is_declared(compression: Compressor, kind: str, path: str) -> None:
    for size in SIZES:
        x = KINDS[kind](size)
        for shape in {(size,), (size // 7, 7) if size % 7 == 0 else (size, 1)}:
            most = compression.error(x, Spec("p", shape)) if size else 0.0
            got = sent(compression, x, shape)
            assert torch.isfinite(got).all() or not math.isfinite(most)
            if compression.approximates and math.isfinite(most):
                assert float((x.double() - got.double()).norm()) <= most * (1 + 1e-6)


UNBIASED = [
    "int8(block=64, stochastic=true)",
    "qsgd",
    "qsgd(levels=1, bucket=64)",
    "terngrad(clip=inf)",
    "qsgd(levels=3, norm=max)",
]
UNBIASED += ["random_k(ratio=0.2, scaled=true)", "dense", "sufficient_factors"]


@pytest.mark.parametrize("text", UNBIASED)
def test_unbiased_ones_are_right_on_average(text: str, path: str) -> None:
    """Over 2,000 draws the mean of each of 50 values lies within five standard errors, but for once in 30,000 runs."""
    compression, draws = of(text), 2000
    assert compression.unbiased
    x = torch.randn(50, generator=torch.Generator().manual_seed(3))
    all_sent = torch.stack([sent(compression, x, (50,), step).double() for step in range(draws)])
    off = (all_sent.mean(0) - x.double()).abs()
    assert (off <= 5 * all_sent.std(0) / math.sqrt(draws) + 1e-6).all()


@compressors
def test_what_is_called_unbiased_is_tested(compression: Compressor) -> None:
    assert not compression.unbiased or compression.name in {text.partition("(")[0] for text in UNBIASED}


@compressors
@hypothesis.given(st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=4), st.integers(1, 6))
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
def test_any_shapes(compression: Compressor, shapes: list[list[int]], workers: int) -> None:
    """Replicas agree, sizes are those declared, and nothing is read or written outside."""
    specs = specs_of([tuple(shape) for shape in shapes], torch.float32)
    crowd = Crowd(compression, workers)
    for step in range(2):
        means = crowd.exchange(specs, draw(specs, workers, step))
        assert all(fit(seen, compression.rounds(specs, workers)) for seen in crowd.rounds)
        assert all(torch.equal(other[name], means[0][name]) for other in means[1:] for name in other)


# --- in two phases ----------------------------------------------------------------------------------------------------

CODED = [
    "int8(block=64)",
    "int8(block=64, stochastic=true)",
    "onebit",
    "sign",
    "sign(scaled=true)",
    "twobit",
    "terngrad",
]
CODED += ["qsgd(bucket=64)", "qsgd(levels=3, bucket=64, norm=max)"]


@pytest.mark.parametrize("text", CODED)
@pytest.mark.parametrize("workers", [3, 5])
@pytest.mark.usefixtures("cheap_rounds")
def test_large_parameters_travel_in_two_phases(text: str, workers: int, path: str) -> None:
    """Two rounds whose bytes do not grow with the number of workers; replicas agree, in any buckets."""
    compression = of(text)
    declared = compression.rounds(LARGE, workers)
    assert declared[0].op is Scatter and len(declared) == 2
    whole = sum(compression.size(spec.numel, spec.shape[-1]) for spec in LARGE)
    assert declared[0].nbytes + workers * declared[1].nbytes < 2.5 * whole + 100 * workers
    splits: list[Sequence[Sequence[Spec]]] = [[LARGE], [LARGE[:1], LARGE[1:]], [LARGE[2:], LARGE[:2]]]
    crowds = [Crowd(compression, workers, topology) for topology in (None, Direct(), None)]
    for step in range(2):
        grads = draw(LARGE, workers, step)
        means = crowds[0].exchange(LARGE, grads)
        assert all(fit(seen, declared) for seen in crowds[0].rounds)
        assert all(torch.equal(other[name], means[0][name]) for other in means[1:] for name in other)
        crowds[0].step += 1
        for crowd, split in zip(crowds[1:], splits[1:], strict=True):
            other = exchanged(crowd, split, grads)
            assert all(torch.equal(other[name], means[0][name]) for name in other)


@pytest.mark.parametrize(
    "text",
    ["int8(block=64)", "onebit", "sign(scaled=true)", "twobit(threshold=0.1)", "terngrad", "qsgd(bucket=64)"],
)
@pytest.mark.usefixtures("cheap_rounds")
def test_feedback_works_on_both_sides(text: str, path: str) -> None:
    """What the owner of a share rounds away is owed by it: nothing is lost, summed over workers and steps."""
    crowd = Crowd(of(f"error_feedback({text})"), 4)
    assert crowd.compressor.rounds(LARGE, 4)[0].op is Scatter
    given = {spec.name: torch.zeros(spec.numel, dtype=torch.float64) for spec in LARGE}
    got = {spec.name: torch.zeros(spec.numel, dtype=torch.float64) for spec in LARGE}
    for step in range(4):
        grads = draw(LARGE, 4, step)
        means = crowd.exchange(LARGE, grads)[0]
        crowd.step += 1
        for spec, mine in itertools.product(LARGE, grads):
            given[spec.name] += mine[spec.name].double()
        for spec in LARGE:
            got[spec.name] += means[spec.name].double()
    for spec in LARGE:
        residual = sum(state[spec.name]["residual"].double() for state in crowd.states)
        assert torch.allclose(given[spec.name], got[spec.name] + residual, rtol=0, atol=1e-5)


def test_most_workers_decide() -> None:
    votes = [
        torch.tensor([1.0, -2.0, 0.5, -1.0]),
        torch.tensor([1.0, -1.0, -3.0, -1.0]),
        torch.tensor([-9.0, 1.0, -1.0, -1.0]),
    ]
    crowd = Crowd(of("sign"), 3)
    means = crowd.exchange([Spec("p0", (4,))], [{"p0": vote} for vote in votes])
    assert all(mean["p0"].tolist() == [1.0, -1.0, -1.0, -1.0] for mean in means)


# --- fast against plain -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*CODED, "qsgd(levels=7)", "qsgd(levels=127, bucket=64)", "int8(block=8)"])
@pytest.mark.parametrize("kind", KINDS)
def test_fast_paths_do_what_plain_ones_do(text: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders give the same bits; encoders differ by a last bit at most, where they add up in another order."""
    compression = of(text)
    assert isinstance(compression, Coded)
    for count, width in ((1, 1), (7, 7), (64, 8), (1029 * 3, 1029), (5000, 50)):
        x = KINDS[kind](count)
        found = []
        for fast in (True, False):
            with monkeypatch.context() as patch:
                if not fast:
                    patch.setattr(kernels, "of", lambda tensor: None)
                code, residual = torch.zeros(compression.size(count, width), dtype=torch.uint8), torch.zeros(count)
                compression.encode(x, code, width, 77, residual)
            found.append((code, residual))
        (code, residual), (plain_code, plain_owed) = found
        outs = []
        for fast, add in itertools.product((True, False), repeat=2):
            with monkeypatch.context() as patch:
                if not fast:
                    patch.setattr(kernels, "of", lambda tensor: None)
                out = x.clone()
                compression.decode(code, out, width, add)
                outs.append(out)
        assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
        assert torch.equal(outs[1], x) or torch.equal(residual, x - outs[1])
        size = float(x.abs().max()) + 1e-37
        assert float((residual - plain_owed).abs().max()) <= 1e-6 * size or not torch.equal(code, plain_code)
        differing = int((code != plain_code).sum())
        assert differing <= 0.02 * code.numel() + 16 * -(-count // 8)


@hypothesis.given(st.integers(1, 3000), st.floats(0, 1), st.sampled_from(sorted(KINDS)), st.booleans())
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
def test_the_largest_are_found(count: int, share: float, kind: str, rounded: bool) -> None:
    x = KINDS[kind](count)
    x = x.round() if rounded else x
    k = max(1, int(share * count))
    places, values = torch.zeros(k, dtype=torch.int32), torch.zeros(k)
    fast = kernels.of(x)
    assert fast is not None
    fast.topk_encode(x, torch.zeros(2 * k + 1024, dtype=torch.int32), places, values)
    assert bool((places.diff() > 0).all()) and torch.equal(x[places], values)
    assert torch.equal(values.abs().sort().values, x.abs().topk(k).values.sort().values)


def test_sampling_sends_about_as_many() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    for way in (kernels.of, lambda tensor: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "of", way)
            got = sent(of("topk(ratio=0.01, sampled=true)"), x, (200_000,))
        count = int((got != 0).sum())
        assert 1000 <= count <= 2000 and torch.equal(got[got != 0], x[got != 0])
        assert float(x[got != 0].abs().min()) > 2.2


@hypothesis.given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=70))
@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
def test_packed_and_unpacked(width: int, codes: list[int]) -> None:
    given = torch.tensor([code % 2**width for code in codes], dtype=torch.uint8)
    packed = kernels.pack(given, width)
    assert packed.numel() == kernels.packed_size(len(codes), width)
    assert torch.equal(kernels.unpack(packed, len(codes), width), given)


def test_uniform_is_uniform() -> None:
    drawn = kernels.uniform(100_000, 12345, torch.device("cpu"))
    assert float(drawn.min()) >= 0 and float(drawn.max()) < 1
    assert abs(float(drawn.mean()) - 0.5) < 0.005 and abs(float(drawn.var()) - 1 / 12) < 0.002
    assert abs(float(torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1])) < 0.02
    assert not torch.equal(drawn, kernels.uniform(100_000, 12346, torch.device("cpu")))


# --- momentum ---


@pytest.mark.parametrize("warmup", [0, 4])
def test_deep_gradient_compression_is_the_papers_recurrence(warmup: int) -> None:
    """Against the paper's pseudo-code, worker by worker."""
    compression, spec, workers, momentum = of(f"dgc(ratio=0.02, warmup={warmup})"), Spec("p0", (100,)), 3, 0.9
    states: list[State] = [{} for _ in range(workers)]
    u, v = torch.zeros(workers, 100), torch.zeros(workers, 100)
    sizes = []
    for step in range(6):
        grads = [torch.randn(100, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(workers)]
        pieces = [Piece(spec, grad.clone(), torch.zeros(100)) for grad in grads]
        contexts = [Context(step=step, rank=r, workers=workers, momentum=momentum) for r in range(workers)]
        flows = [
            compression.exchange(Bucket((piece,)), state, ctx)
            for piece, state, ctx in zip(pieces, states, contexts, strict=True)
        ]
        loopback.run(flows)
        mean = torch.zeros(100)
        for r in range(workers):
            u[r] = momentum * u[r] + grads[r]
            v[r] += u[r]
            k = math.ceil(compression._ratio(step) * 100)
            mask = torch.zeros(100).index_fill_(0, v[r].abs().topk(k).indices, 1.0).bool()
            mean[mask] += v[r][mask]
            u[r][mask], v[r][mask] = 0.0, 0.0
        sizes.append(k)
        assert all(torch.allclose(piece.mean, mean, atol=1e-6) for piece in pieces)
        assert all(
            torch.allclose(state["p0"]["residual"], row, atol=1e-6) for state, row in zip(states, v, strict=True)
        )
    assert sizes == ([25, 25, 7, 2, 2, 2] if warmup else [2] * 6)


# --- significance ---


def test_what_would_change_a_parameter_enough_is_sent() -> None:
    """lr |x| against threshold |w|, which shrinks with the root of the step; the rest is owed, and adds up."""
    compression, value = of("error_feedback(significant(threshold=0.1, lr=0.5))"), torch.tensor([1.0, -10.0, 0.0, 1.0])
    state: State = {}
    grad = torch.tensor([0.2, 1.9, 1e-6, 0.0])
    got = []
    for step in range(2):
        piece = Piece(Spec("p", (4,)), grad.clone(), torch.full((4,), 9.0), value=value)
        loopback.run([compression.exchange(Bucket((piece,)), state, Context(step=step, rank=0, workers=1))])
        got.append(piece.mean.tolist())
    assert got[0] == pytest.approx([0.2, 0.0, 1e-6, 0.0])  # 0.1 of 1 passes, 0.95 of 10 does not
    assert got[1] == pytest.approx([0.2, 3.8, 1e-6, 0.0])


# --- low rank ---


@pytest.mark.parametrize("workers", [2, 3])
def test_powersgd_is_exact_where_the_mean_has_its_rank(workers: int) -> None:
    """Each worker's matrix has full rank, the mean has rank 2: exact only if all multiply by the same Q."""
    crowd, random = Crowd(of("powersgd(rank=3)"), workers), torch.Generator().manual_seed(1)
    spec = Spec("p0", (13, 9), torch.float64)
    for _ in range(3):  # the second and third steps start warm, from another matrix's Q
        mean = torch.randn(13, 2, generator=random).double() @ torch.randn(2, 9, generator=random).double()
        noise = torch.randn(workers, 13, 9, generator=random).double()
        shares = mean / workers + noise - noise.mean(0)
        means = crowd.exchange([spec], [{"p0": share.reshape(-1)} for share in shares])
        assert all(torch.allclose(each["p0"].view(13, 9), mean, rtol=0, atol=1e-9) for each in means)


def test_powersgd_warms_up_to_the_best_approximation() -> None:
    crowd, random = Crowd(of("powersgd(rank=2)"), 2), torch.Generator().manual_seed(7)
    grads = [torch.randn(13, 9, generator=random).double() for _ in range(2)]
    target = grads[0] + grads[1]
    best = torch.linalg.svdvals(target)[2:].norm()  # what any rank 2 must miss [Eckart & Young 1936]
    spec = Spec("p0", (13, 9), torch.float64)
    misses = []
    for _ in range(200):
        means = crowd.exchange([spec], [{"p0": grad.reshape(-1)} for grad in grads])
        misses.append(float((means[0]["p0"].view(13, 9) - target).norm()))
    assert misses[-1] < best * (1 + 1e-6) < misses[0]


# --- what cannot be ---


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("error_feedback(sign)", "does not approximate the gradient"),
        ("error_feedback(random_k(scaled=true))", "does not approximate the gradient"),
        ("error_feedback(dense)", "there is no residual"),
        ("error_feedback(only(error_feedback(topk)))", "keeps the same residual twice"),
        ("mixed(error_feedback(error_feedback(topk)))", "keeps the same residual twice"),
        ("only(dgc)", "takes over the momentum of all parameters"),
        ("error_feedback(dgc)", "takes over the momentum"),
    ],
)
def test_what_cannot_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(Conflict, match=why):
        Strategy.parse(f"bsp / direct / {text}").check()


@pytest.mark.parametrize(
    "text",
    [
        "error_feedback(only(topk))",
        "only(error_feedback(topk))",
        "mixed(error_feedback(onebit), vectors=cast)",
        "only(only(int8))",
    ],
)
def test_what_can_be_is_not(text: str) -> None:
    Strategy.parse(f"bsp / direct / {text}").check()


NONSENSE = [
    "int8(block=7)",
    "qsgd(levels=0)",
    "qsgd(levels=200)",
    "qsgd(bucket=5)",
    "topk(ratio=2)",
    "random_k(ratio=0)",
]
NONSENSE += [
    "twobit(threshold=0)",
    "threshold(tau=-1)",
    "terngrad(clip=0)",
    "gradient_dropping(drop=1)",
    "adacomp(bin=0)",
]
NONSENSE += ["powersgd(rank=0)", "dgc(ratio=0)", "dgc(clip=0)", "dgc(warmup=-1)"]


@pytest.mark.parametrize("text", NONSENSE)
def test_parameters_that_make_no_sense(text: str) -> None:
    with pytest.raises(SpellingError, match="but must"):
        Strategy.parse(f"bsp / direct / {text}")


@pytest.mark.parametrize("text", ["topk", "gradient_dropping", "threshold", "error_feedback(adacomp)", "dgc"])
def test_places_that_cannot_be_named_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="names the places of"):
        of(text).rounds([Spec("p", (2**31 + 8,))], 2)


# --- low rank ---------------------------------------------------------------------------------------------------------


def test_a_matrix_of_low_rank_comes_through_whole() -> None:
    rng = torch.Generator().manual_seed(5)
    matrix = torch.randn(40, 3, generator=rng) @ torch.randn(3, 60, generator=rng)
    got = sent(of("powersgd(rank=3)"), matrix.view(-1), (40, 60))
    assert torch.allclose(got, matrix.view(-1), atol=1e-4)


def test_a_warm_start_finds_the_largest_directions() -> None:
    rng = torch.Generator().manual_seed(6)
    matrix = torch.randn(64, 64, generator=rng)
    left, sizes, right = torch.linalg.svd(matrix)
    matrix = left @ torch.diag(sizes * torch.logspace(0, -2, 64)) @ right
    best = float(torch.linalg.svdvals(matrix)[2:].square().sum().sqrt())
    crowd, spec = Crowd(of("powersgd(rank=2)"), 1), [Spec("p0", (64, 64))]
    errors = []
    for _ in range(12):
        (mean,) = crowd.exchange(spec, [{"p0": matrix.reshape(-1).clone()}])
        errors.append(float((mean["p0"] - matrix.reshape(-1)).norm()))
        crowd.step += 1
    assert errors[-1] < 1.05 * best and errors[-1] < errors[0]


def test_orthonormal_also_where_columns_repeat() -> None:
    one = torch.randn(10, 1, generator=torch.Generator().manual_seed(7))
    made = orthonormal(torch.cat([one, 2 * one, torch.zeros(10, 1), torch.eye(10, 1)], 1))
    gram = made.T @ made
    assert torch.allclose(gram, torch.diag(torch.tensor([1.0, 0.0, 0.0, 1.0])), atol=1e-5)
