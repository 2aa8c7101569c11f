"""Every system of the catalogue that runs shows its mechanism: one check a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from tests.process.observed import RATE, STEPS, Fading, Seen, Wide, constant, layers, ranked, seen
from weft import systems
from weft.runtime.server.protocol import Verb

# --- one check a row --------------------------------------------------------------------------------------------------


CHECKS: dict[str, Callable[[], None]] = {}
"""By a row's id."""


def row(check: Callable[[], None]) -> Callable[[], None]:
    CHECKS[check.__name__] = check
    return check


def circles(run: Seen) -> bool:
    """Whether bytes go around a ring, 2 (n-1)/n of all gradients over each of its links, and nowhere else."""
    after = {source: sink for (source, sink), share in run.traffic().items() if share == pytest.approx(1.5, rel=0.05)}
    around = [0]
    while len(around) < 4:
        around.append(after[around[-1]])
    heavy = [ends for ends, share in run.traffic().items() if share > 0.05]
    return len(heavy) == 4 and sorted(around) == [0, 1, 2, 3]


def pairs(run: Seen, near: float, far: float) -> bool:
    """Whether each of four exchanges such shares with the partner beside it and the one two away, and with no other."""
    shares = {ends: share for ends, share in run.traffic().items() if share > 0.05}
    expected = {(a, a ^ 1): near for a in range(4)} | {(a, a ^ 2): far for a in range(4)}
    return shares == pytest.approx(expected, rel=0.2)


def climbs(run: Seen, share: float = 1.0) -> bool:
    """Whether all gradients go up and down a binomial tree of four, once each way, and nowhere else."""
    shares = {ends: found for ends, found in run.traffic().items() if found > 0.05}
    edges = [(1, 0), (3, 2), (2, 0)]
    return shares == pytest.approx({ends: share for a, b in edges for ends in ((a, b), (b, a))}, rel=0.2)


def after_backward(run: Seen) -> bool:
    return len(run.buckets(STEPS)) == 1 and run.starts() < 0.5


def during_backward(run: Seen) -> bool:
    return run.starts() > 0.5


@row
def baidu_ring() -> None:
    assert circles(layers("baidu_ring", 4))


@row
def chainermn() -> None:
    run = layers("chainermn", 4)
    assert circles(run) and after_backward(run)
    assert all(torch.equal(each["grads"]["first.bias"], run.workers[0]["grads"]["first.bias"]) for each in run.workers)


@row
def bsp_a2a() -> None:
    assert after_backward(layers("bsp_a2a", 4))


@row
def horovod() -> None:
    run = layers("horovod", 4)
    assert circles(run) and during_backward(run)
    assert len(run.buckets(STEPS)) == 2  # the first at 1 MiB, and all else


@row
def ddp() -> None:
    run = layers("ddp", 4)
    assert circles(run) and during_backward(run)
    assert 1 < len(run.buckets(STEPS)) < 12
    assert all(torch.equal(each["grads"]["first.bias"], run.workers[0]["grads"]["first.bias"]) for each in run.workers)


@row
def wfbp_a2a() -> None:
    run = layers("wfbp_a2a", 4)
    assert circles(run) and during_backward(run)
    assert len(run.buckets(STEPS)) == 12


@row
def mg_wfbp() -> None:
    run = layers("mg_wfbp", 4)
    assert len(run.buckets(1)) == 12 and during_backward(run)
    assert len(run.buckets(STEPS)) < 12  # merged, once times were measured


@row
def caffe2() -> None:
    run = layers("caffe2", 4)
    assert pairs(run, 0.5, 1.0) and during_backward(run)
    assert len(run.buckets(STEPS)) == 12


@row
def halving_doubling() -> None:
    assert pairs(layers("halving_doubling", 4), 0.5, 1.0)


@row
def recursive_doubling() -> None:
    assert pairs(layers("recursive_doubling", 4), 1.0, 1.0)


@row
def firecaffe() -> None:
    run = layers("firecaffe", 4)
    assert climbs(run)
    assert sum(share for (_, sink), share in run.traffic().items() if sink == 0) < 2.1  # of three who would send to it


@row
def terascale_tree() -> None:
    run = layers("terascale_tree", 4)
    assert climbs(run) and after_backward(run)


@row
def bytescheduler_a2a() -> None:
    run = seen(str(systems.find("bytescheduler_a2a").strategy), 2, Wide, 8, 0.0, 0.0)
    first, last = ([bucket for bucket, *_ in run.buckets(step)] for step in (1, 8))
    ((large, parts),) = Counter(last).most_common(1)
    assert parts >= 8  # 32 MiB in parts of 4
    assert first[-1] == max(first)  # in the order of backward, until times were measured
    assert last[-1] == large < max(last)  # then the front layer overtakes


def dense(run: Seen) -> float:
    """The largest share of all gradients that a worker is sent by another in a step; 1 without compression."""
    return max(run.traffic().values(), default=0.0)


@row
def onebit_sgd() -> None:
    run = layers("onebit_sgd", 5)  # of so many, each sums up its share and encodes the sum
    assert dense(run) < 1 / 20
    assert all(len(row.unique()) == 2 for row in run.grad())  # two numbers stand for an output's entries


@row
def terngrad() -> None:
    run = layers("terngrad")
    assert dense(run) < 1 / 12
    assert 0 in run.grad() and len(run.grad().unique()) <= 9  # two workers, each with a scale times -1, 0 or 1


@row
def gradient_dropping() -> None:
    run = layers("gradient_dropping")
    assert dense(run) < 1 / 12
    assert 0.001 < (run.grad() != 0).float().mean() < 0.05  # two workers' 1 percent, by an estimated cut-off


@row
def adacomp() -> None:
    run = layers("adacomp")
    assert dense(run) < 1 / 12
    bins = run.grad().flatten()[:65500].view(-1, 500)
    assert (bins != 0).any(dim=1).all() and (run.grad() != 0).float().mean() < 0.5  # something of every bin


@row
def dgc() -> None:
    run = layers("dgc", momentum=0.9)
    assert dense(run) < 1 / 100
    assert 66 <= (run.grad() != 0).sum() <= 2 * 66  # one in a thousand of 65,536, from two workers


@row
def low_rank() -> None:
    run = layers("low_rank")
    assert dense(run) < 1 / 12
    values = torch.linalg.svdvals(run.grad().double())
    assert values[3] > 1e-4 * values[0] > 1e2 * values[4]  # rank 4


@row
def mxnet_2bit() -> None:
    assert sum(layers("mxnet_2bit").received()) == pytest.approx(2 / 16, rel=0.05)  # 2 bits of 32, from two workers
    run = seen(str(systems.find("mxnet_2bit").strategy), 2, Fading, STEPS, 0.0, 0.0)
    path = [a for a, _ in run.workers[0]["path"]]
    assert path == [1, 2, 3, 4, 5, 6]  # 2, 2, 2, 0, 0, 0, halved by two workers, go as the threshold of each


def pushes_whole(run: Seen, parts: float = 1.0) -> bool:
    """Whether servers that share the model get two workers' gradients, and each as much of them."""
    return run.received() == pytest.approx([2 * parts / len(run.servers)] * len(run.servers), rel=0.05)


def early(run: Seen) -> list[int]:
    """By step: pushes that left before backward's pause was over."""
    ends = [end for _, end in run.workers[0]["pauses"]]
    times = [at for at, *_ in run.asked(Verb.PUSH)]
    return [sum(start < at < end for at in times) for start, end in zip(run.workers[0]["computed"], ends, strict=True)]


@row
def bsp_ps() -> None:
    run = layers("bsp_ps")
    assert len(run.servers) == 2 and pushes_whole(run)
    assert early(run) == [0] * STEPS


@row
def wfbp_ps() -> None:
    run = layers("wfbp_ps")
    assert len(run.servers) == 2 and pushes_whole(run)
    assert all(count >= 10 for count in early(run))  # five of six layers


def pieces(system: str) -> tuple[Seen, list[tuple[float, int, int]]]:
    """The pushes of a step but the first, in whose course the order is learned."""
    run = seen(str(systems.find(system).strategy), 2, Wide, 3, 0.0, 0.0)
    pushes = run.asked(Verb.PUSH)
    return run, pushes[2 * len(pushes) // 3 :]


def front_first(run: Seen, pushes: list[tuple[float, int, int]]) -> bool:
    """Whether what left last, the front layer's, is the most urgent, there and back."""
    back = [urgency for _, _, urgency in run.asked(Verb.PULL)][-len(pushes) :]
    there = [urgency for _, _, urgency in sorted(pushes)]
    return there[-1] == min(there) < there[0] and min(back) == min(there)


@row
def bytescheduler_ps() -> None:
    run, pushes = pieces("bytescheduler_ps")
    assert 2000 * 2**10 < max(nbytes for _, nbytes, _ in pushes) <= 4000 * 2**10
    assert front_first(run, pushes)


@row
def p3() -> None:
    run, pushes = pieces("p3")
    assert 100_000 < max(nbytes for _, nbytes, _ in pushes) <= 200_000
    assert front_first(run, pushes)


@row
def tictac() -> None:
    run, pushes = pieces("tictac")
    assert max(nbytes for _, nbytes, _ in pushes) == 2048 * 4096 * 4 // 2  # all that one server has of it
    assert front_first(run, pushes)


@row
def caffe_on_spark() -> None:
    run = layers("caffe_on_spark")
    assert len(run.servers) == 2 and pushes_whole(run)
    assert early(run) == [0] * STEPS


@row
def bigdl() -> None:
    run = layers("bigdl")
    assert len(run.servers) == 2 and pushes_whole(run, 0.5)
    assert early(run) == [0] * STEPS


@row
def mxnet() -> None:
    run = layers("mxnet", 4)
    servers, proxies = run.received()[:2], run.received()[2:]
    assert proxies == pytest.approx([2, 2], rel=0.05)  # each sums up two workers' gradients
    assert servers == pytest.approx([1, 1], rel=0.05)  # of two groups, and not of four workers


@row
def hogwild() -> None:
    run = constant("hogwild")
    assert not run.servers and not run.traffic()
    assert all(each["shared"] for each in run.workers)
    assert 12 < run.moved()[0] <= 24  # each sees the other's updates


@row
def downpour() -> None:
    run = constant("downpour")
    assert run.moved() == [24, 24] and max(run.late()) > 0
    assert len(run.asked(Verb.PUSH)) == 24 and len(run.asked(Verb.PULL)) >= 24  # in every step, of two servers
    quick, slow = run.workers[0]["computed"], run.workers[1]["computed"]
    assert quick[-1] < slow[-2]  # at its own pace


def ahead(run: Seen) -> int:
    """How many steps the quick worker was ahead when it began one, at most; counted from what the slow one computed."""
    done = run.workers[1]["computed"]
    return max(step - sum(at < began for at in done) for step, began in enumerate(run.workers[0]["forwards"]))


@row
def ssp() -> None:
    assert 1 < ahead(constant("ssp")) <= 3


@row
def cui2014() -> None:
    run = constant("cui2014")
    assert 0 < max(run.late()) <= 2 * (3 + 1)
    assert any(who == 0 and on == 1 and seconds > 0.05 for who, on, seconds in run.servers[0]["waits"])


@row
def essp() -> None:
    run = constant("essp")
    assert 1 < ahead(run) <= 3
    assert len(run.asked(Verb.WATCH)) > len(run.asked(Verb.PULL))  # sent without being asked for, after the start


@row
def dynsgd() -> None:
    run = constant("dynsgd")
    assert max(run.late()) > 0
    assert run.moved() == pytest.approx(run.residual(lambda late: 1 / (late + 1)))


@row
def n_softsync() -> None:
    run = constant("n_softsync", 4)
    assert [server["updates"] for server in run.servers] == [24, 24]  # two of four workers' 48 contributions make one
    assert run.moved() == pytest.approx(run.residual(lambda late: 1 / (late + 1), per_update=2))


@row
def dc_asgd() -> None:
    run = constant("dc_asgd")
    assert max(run.late()) > 0
    assert run.moved() == pytest.approx(run.residual(lambda late: 1 - 0.04 * RATE * late), rel=1e-3)
    assert run.moved()[0] < 24 * (1 - 1e-3)


@row
def implicit_momentum() -> None:
    run = constant("implicit_momentum", momentum=0.9)
    steps = [sum(0.4**k for k in range(update)) for update in range(1, 25)]  # 0.9 - (1 - 1/2)
    assert run.moved() == pytest.approx([sum(steps)] * 2, rel=1e-5)


@row
def backup_workers() -> None:
    run = constant("backup_workers")
    assert set(run.late()) == {0}
    assert run.late().total() < 48  # of two workers' 12 steps, on two servers: late ones were dropped
    assert run.moved() == [server["updates"] for server in run.servers]


def meets(run: Seen, every: int) -> bool:
    """Whether two workers go their own ways, and meet in the middle every few steps, twice."""
    own = [[run.path(worker)[step] for step in (every - 1, every, every + 1)] for worker in (0, 1)]
    mean = 1.5 * every
    apart = own == [[every - 1, mean, mean + 1], [2 * (every - 1), mean, mean + 2]]
    return apart and run.path(0)[2 * every] == run.path(1)[2 * every] == 2 * mean


@row
def sparknet() -> None:
    run = ranked("sparknet", 100)
    assert meets(run, 50) and run.merges() == [50, 100]


@row
def local_sgd() -> None:
    run = ranked("local_sgd", 16)
    assert meets(run, 8) and run.merges() == [8, 16]
    assert {event["wire_bytes"] for event in run.events if event["step"] % 8} == {0}


@row
def deeplearning4j() -> None:
    run = ranked("deeplearning4j", 10)
    assert meets(run, 5) and run.merges() == [5, 10]
    assert climbs(layers("deeplearning4j", 4), 2 / STEPS)  # after five steps, and in the end


def block_momentum(run: Seen) -> bool:
    """Whether the first block moves the model by 60 learning rates, and the second by 0.9 of that and 60."""
    found = [run.path(worker)[step] for step in (40, 80) for worker in (0, 1)]
    return run.merges() == [40, 80] and found == pytest.approx([60, 60, 174, 174], rel=1e-5)


@row
def bmuf() -> None:
    assert block_momentum(ranked("bmuf", 80))


@row
def cntk() -> None:
    assert block_momentum(ranked("cntk", 80))
    assert 0 < dense(layers("cntk", 5)) * STEPS < 1 / 12  # one merge, in the end


@row
def crossbow() -> None:
    run = ranked("crossbow", 8)
    assert run.merges() == [1, 2, 3, 4, 5, 6, 7, 8]
    central, before, copies = 0.0, 0.0, [0.0, 0.0]
    for step in range(1, 8):  # the eighth is the last, when every learner gets the central model
        copies = [copy + rank for rank, copy in enumerate(copies, 1)]
        corrections = [(copy - central) / 2 for copy in copies]
        central, before = central + sum(corrections) + 0.9 * (central - before), central
        copies = [copy - correction for copy, correction in zip(copies, corrections, strict=True)]
        assert [run.path(worker)[step] for worker in (0, 1)] == pytest.approx(copies, rel=1e-4)


@row
def diloco() -> None:
    run = ranked("diloco", 501)
    assert run.merges() == [500]
    first = 0.7 * (1 + 0.9) * 750  # Nesterov's first step, by the mean of 500 and 1,000
    assert [run.path(0)[at] for at in (499, 500, 501)] == pytest.approx([499, first, first + 1], rel=1e-5)
    assert run.path(1)[500] == pytest.approx(first, rel=1e-5)


@row
def streaming_diloco() -> None:
    run = ranked("streaming_diloco", 60)
    assert run.merges() == [20, 30, 40, 50, 60]  # each layer is used ten steps after it was sent, the first one twice
    for layer, sent in enumerate((10, 20, 30, 40)):
        anchor = 0.7 * (1 + 0.9) * 1.5 * sent
        for worker in (0, 1):
            path = run.path(worker, layer)
            own = (worker + 1) * (sent + 10)
            assert path[sent + 9] == pytest.approx((worker + 1) * (sent + 9))
            assert path[sent + 10] == pytest.approx((own + anchor) / 2, rel=1e-5)
    assert 0 < sum(event["wire_bytes"] for event in run.events[:20]) < 2 * 4 * 8  # four bits and the norm, not dense


RUNS = [each.id for each in systems.catalogue() if each.status == "runs"]


def test_every_row_that_runs_has_a_check_of_its_own() -> None:
    assert sorted(CHECKS) == sorted(RUNS)


@pytest.mark.parametrize("system", RUNS)
def test_the_mechanism_is_seen(system: str) -> None:
    CHECKS[system]()
