"""Pipeline schedules: what a stage does, in order. ("F", 2) is the forward pass of micro-batch 2.

    python src/parallelism/pipeline.py

draws them.
"""

from __future__ import annotations

from lmworks.learn import unfinished  # noqa: F401 - what is not written yet runs as the reference does

Work = list[tuple[str, int]]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Work:
    """ "F" and "B" of every micro-batch, for stage 0 … stages − 1."""
    # exercise one_f_one_b(stage, stages, micro_batches)
    ahead = min(stages - 1 - stage, micro_batches)
    work = [("F", index) for index in range(ahead)]
    for index in range(micro_batches):
        if ahead + index < micro_batches:
            work.append(("F", ahead + index))
        work.append(("B", index))
    return work
    # end one_f_one_b


def zero_bubble(stage: int, stages: int, micro_batches: int) -> Work:
    """ "F", "I" (backward for the inputs) and "W" (backward for the weights, after I) of every micro-batch."""
    # exercise zero_bubble(stage, stages, micro_batches)
    ahead = min(stages - 1 - stage, micro_batches)
    work = [("F", index) for index in range(ahead)]
    for index in range(micro_batches):
        if ahead + index < micro_batches:
            work.append(("F", ahead + index))
        work.append(("I", index))
        if index >= stage:
            work.append(("W", index - stage))
    return work + [("W", index) for index in range(max(0, micro_batches - stage), micro_batches)]
    # end zero_bubble


def main() -> None:
    for schedule in (one_f_one_b, zero_bubble):
        print(f"{schedule.__name__}, 4 stages, 8 micro-batches, in the order of each stage:")
        for stage in range(4):
            print(f"  stage {stage}  " + " ".join(f"{kind}{index}" for kind, index in schedule(stage, 4, 8)))


if __name__ == "__main__":
    main()
