"""How often a cluster stops, what a stop costs, how often to save: in closed form, and by simulation.

Stops come at random, M seconds apart on average. A run trains τ seconds, takes a snapshot that holds it up for δ, and
writes that in the background for w; only then does the save count (a synchronous save is all δ, w = 0). A snapshot
waits for the write before it, so saves are c = max(τ, w) + δ apart. A stop takes the work since the last save that
counts, D seconds to notice, and R to start and load; a stop during those R seconds begins them anew. Between two
restarts e^(−(w+τ+δ)/M) / (1 − e^(−c/M)) saves are made on average, and M time passes, D and the restart apart, so

    ETTR = τ · e^(−(w+τ+δ+R)/M) / ((M + D) · (1 − e^(−c/M)))

is the share of the time that trains for good. With w = D = 0 this is Daly's τ / (M e^(R/M) (e^((τ+δ)/M) − 1)) (Future
Generation Computer Systems 22, 2006), and its best τ to first order Young's √(2δM) (CACM 17, 1974).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..spec import SpecError
from .case import Number

# Stops of one GPU in an hour, from published runs.
RATES = {
    "llama3": 419 / (54 * 24 * 16_384),  # 419 unplanned in 54 days on 16,384 H100s (arXiv 2407.21783, section 3.3.4)
    "rsc1": 6.50 / (1000 * 24 * 8),  # 6.50 in 1,000 days of a node of 8 A100s (arXiv 2410.21680, Meta's RSC-1)
    "rsc2": 2.34 / (1000 * 24 * 8),  # its smaller RSC-2, of the same paper
}
MOST_STOPS = 100_000  # in one simulated run


@dataclass(frozen=True)
class Recovery:
    """The letters above, in seconds; each may be an array."""

    mtbf_s: Number  # M
    stall_s: Number  # δ
    write_s: Number = 0.0  # w
    restart_s: Number = 0.0  # R
    detect_s: Number = 0.0  # D

    def check_possible(self) -> None:
        for key in ("mtbf_s", "stall_s"):
            refuse(key, getattr(self, key), np.any(np.asarray(getattr(self, key)) <= 0), "more than 0")
        for key in ("write_s", "restart_s", "detect_s"):
            refuse(key, getattr(self, key), np.any(np.asarray(getattr(self, key)) < 0), "0 or more")

    def synchronous(self) -> Recovery:
        """The same with training held up until the save counts."""
        return replace(self, stall_s=self.stall_s + self.write_s, write_s=0.0)


def mtbf(gpus: Number, stops_per_gpu_hour: Number) -> Number:
    """Mean seconds from one stop of the cluster to the next: N GPUs stop N times as often as one."""
    refuse("stops_per_gpu_hour", stops_per_gpu_hour, np.any(np.asarray(stops_per_gpu_hour) < 0), "0 or more")
    return 3600 / (gpus * np.maximum(stops_per_gpu_hour, 1e-15))


def young(stall_s: Number, mtbf_s: Number) -> Number:
    """Seconds of training between two saves that lose least, to first order: √(2δM)."""
    return np.sqrt(2 * stall_s * mtbf_s)


def best_every(recovery: Recovery) -> Number:
    """Seconds of training between two saves with the best ETTR, exactly: 1 − e^(−(τ+δ)/M) = τ/M, and no less than w.

    Newton's method from √(2δM), which lies above the root, where the curve is concave: it comes down and never passes.
    """
    recovery.check_possible()
    stall = recovery.stall_s / recovery.mtbf_s
    share = np.minimum(young(recovery.stall_s, recovery.mtbf_s) / recovery.mtbf_s, 1.0)
    for _ in range(50):
        slope = np.expm1(-share - stall)  # of the line below: 1 − e^(−(x+δ/M)) − x
        share = share - (-slope - share) / slope
    return np.maximum(share * recovery.mtbf_s, recovery.write_s)


def ettr(every_s: Number, recovery: Recovery) -> Number:
    """Share of the time that trains for good, with `every_s` seconds of training between two saves."""
    recovery.check_possible()
    refuse("every_s", every_s, np.any(np.asarray(every_s) <= 0), "more than 0")
    mean, apart = recovery.mtbf_s, np.maximum(every_s, recovery.write_s) + recovery.stall_s
    unhurt = np.exp(-(recovery.write_s + every_s + recovery.stall_s + recovery.restart_s) / mean)
    return every_s * unhurt / ((mean + recovery.detect_s) * -np.expm1(-apart / mean))


def best_steps(step_s: float, recovery: Recovery) -> int:
    """The same in whole steps: of the two around it, the better one."""
    refuse("step_s", step_s, step_s <= 0, "more than 0")
    fewer = max(1, int(best_every(recovery) / step_s))
    return max(fewer, fewer + 1, key=lambda steps: float(ettr(steps * step_s, recovery)))


@dataclass(frozen=True)
class Storage:
    """Where checkpoints go; bytes a second. A rank writes at its own speed while the storage keeps up with all."""

    copy: Number = 25e9  # device to host, of one rank: PCIe 4.0 x16
    rank: Number = 1e9  # host to storage, of one rank
    total: Number = 2e12  # into the storage, of all ranks: what Llama 3's sustains (arXiv 2407.21783, section 3.3.1)

    def seconds(self, bytes_per_rank: Number, ranks: Number) -> tuple[Number, Number]:
        """(to take a snapshot, to write it) of a checkpoint of so many bytes a rank."""
        return bytes_per_rank / self.copy, bytes_per_rank / np.minimum(self.rank, self.total / ranks)


@dataclass(frozen=True)
class Outcome:
    """Of simulated runs, as shares of their time. Arrays: a row for each run, a column for each interval."""

    every_s: NDArray[np.float64]  # the intervals
    ettr: NDArray[np.float64]
    replay: NDArray[np.float64]  # trained, then lost to a stop
    save: NDArray[np.float64]  # held up by a snapshot, or waiting for the write before it
    restart: NDArray[np.float64]  # noticing, starting, loading; the same for all intervals
    stops: NDArray[np.int64]  # of each run


def simulate(every_s: Number, recovery: Recovery, *, days: float = 54.0, trials: int = 200, seed: int = 0) -> Outcome:
    """Let runs stop at random for so many days, and count what is left.

    From one stop to the next nothing is random, so the clock jumps from stop to stop, of all runs at once. The stops
    do not depend on the interval: every interval meets the same ones.
    """
    recovery.check_possible()
    refuse("days", days, days <= 0, "more than 0")
    refuse("trials", trials, trials < 1, "1 or more")
    intervals, end, mean = np.atleast_1d(np.asarray(every_s, float)), days * 86_400, float(recovery.mtbf_s)
    refuse("every_s", every_s, bool(np.any(intervals <= 0)), "more than 0")
    if end / mean > MOST_STOPS:
        raise SpecError(f"{days:g} days with a stop every {mean:g} s are {end / mean:.3g} stops; simulate fewer days")
    random = np.random.default_rng(seed)
    clock, stops = np.zeros(trials), np.zeros(trials, np.int64)
    useful, replay, save = np.zeros((3, trials, len(intervals)))
    restart = np.zeros((trials, 1))
    while np.any(clock < end):
        up = np.minimum(random.exponential(mean, trials), end - clock)
        clock += up
        stopped = clock < end
        stops += stopped
        trained, kept = progress(up[:, None], intervals, recovery)
        lost = np.where(stopped[:, None], trained - kept, 0.0)
        useful, replay, save = useful + trained - lost, replay + lost, save + up[:, None] - trained
        down = np.minimum(restarts(random, stopped, recovery, end - clock), end - clock)
        clock += down
        restart[:, 0] += down
    return Outcome(intervals, useful / end, replay / end, save / end, restart / end, stops)


def progress(
    up: NDArray[np.float64], every_s: NDArray[np.float64], recovery: Recovery
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of training in so long a time without a stop, and those of them that are in a save that counts."""
    first = every_s + recovery.stall_s  # when the first snapshot is taken; the others follow this far apart:
    apart = np.maximum(every_s, recovery.write_s) + recovery.stall_s
    begun = np.where(up > 0, np.maximum(0.0, np.floor((up - first) / apart) + 1), 0.0)  # snapshots behind us
    since = np.where(begun > 0, up - first - (begun - 1) * apart, up)
    trained = begun * every_s + np.minimum(since, every_s)
    kept = np.maximum(0.0, np.floor((up - first - recovery.write_s) / apart) + 1) * every_s
    return trained, kept


def restarts(
    random: np.random.Generator, stopped: NDArray[np.bool_], recovery: Recovery, left: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Seconds from a stop to the next step, 0 where there was none. A stop while it starts begins it anew."""
    down, trying = np.zeros(len(stopped)), stopped.copy()
    while np.any(trying):
        next_stop = random.exponential(float(recovery.mtbf_s), len(down))
        down += np.where(trying, recovery.detect_s + np.minimum(next_stop, recovery.restart_s), 0.0)
        trying &= (next_stop < recovery.restart_s) & (down < left)
    return down


@dataclass(frozen=True)
class Forecast:
    """Of a cluster that saves in one way: how often it should, and what that gives."""

    gpus: int
    saves: str  # synchronous, asynchronous
    recovery: Recovery
    step_s: float
    every: int  # steps between two saves, the best
    ettr: float  # by the formula; the rest is simulated
    mean: float
    worst: float  # that 19 runs in 20 surpass
    replay: float  # shares of the time lost
    save: float
    restart: float
    curve: dict[int, float]  # mean ETTR by steps between two saves


def forecast(
    gpus: int, saves: str, recovery: Recovery, step_s: float, *, days: float, trials: int, seed: int, used: int = 0
) -> Forecast:
    """Simulate the best interval and others around it; `used` is one more to look at, in steps."""
    best = best_steps(step_s, recovery)
    around = {max(1, round(best * 2.0**power)) for power in range(-3, 4)}
    steps = sorted({best, *around, *([used] if used else [])})
    runs = simulate(np.array(steps) * step_s, recovery, days=days, trials=trials, seed=seed)
    here, curve = steps.index(best), dict(zip(steps, runs.ettr.mean(axis=0).tolist(), strict=True))
    return Forecast(
        gpus=gpus,
        saves=saves,
        recovery=recovery,
        step_s=step_s,
        every=best,
        ettr=float(ettr(best * step_s, recovery)),
        mean=curve[best],
        worst=float(np.quantile(runs.ettr[:, here], 0.05)),
        replay=float(runs.replay[:, here].mean()),
        save=float(runs.save[:, here].mean()),
        restart=float(runs.restart.mean()),
        curve=curve,
    )


def refuse(key: str, value: Number, wrong: bool | np.bool_, what_works: str) -> None:
    if wrong:
        raise SpecError(f"{key} = {value}: give {what_works}")
