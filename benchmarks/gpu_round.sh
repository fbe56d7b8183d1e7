#!/bin/bash
# Every check and figure that needs a GPU, each within a hard limit; about 40 minutes on one H200.
#
#   benchmarks/gpu_round.sh [checks|parallel|checkpoint|tune|kernels|train|plan|engine|starts|quant …]     all without an argument
#
# `checks` are the tests and the losses of all paths, side by side: compilers take most of their time, and nothing in them is timed.
# `tune` tries tiles, whose best are then set by hand; `kernels` records who is fastest here, which `train` then uses: in this order.
# Results go to benchmarks/results/; `timeout -k` ends even what catches the first signal (a trainer finishes its step).
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=src:benchmarks:$PYTHONPATH PYTHONUNBUFFERED=1
within() { local limit=$1; shift; timeout -k 5 "$limit" "$@" || echo "failed or out of time ($?): $*"; }

[ $# -gt 0 ] || set -- checks parallel checkpoint tune kernels train plan engine starts quant
for part in "$@"; do
  echo "== $part, $(date +%T)"
  case $part in
    checks)
      export TORCHINDUCTOR_COMPILE_THREADS=2
      within 240 python benchmarks/loss_gpu.py --seeds 0,1 &
      within 400 python benchmarks/gpu_tests.py & wait
      unset TORCHINDUCTOR_COMPILE_THREADS ;;
    parallel) within 120 torchrun --nproc-per-node 1 benchmarks/parallel_gpu.py --save ;;
    checkpoint) within 90 python benchmarks/checkpoint_gpu.py --save ;;
    tune)
      within 190 python benchmarks/flash_tune.py --save
      within 150 python benchmarks/loss_tune.py
      within 150 python benchmarks/elementwise_gpu.py
      within 240 python benchmarks/compile_options.py ;;
    kernels) within 240 python -m lmworks bench kernels --record --out benchmarks/results/kernels_train.json ;;
    train) within 600 python benchmarks/train_gpu.py --profile ;;
    plan) within 200 python benchmarks/plan_check.py --device cuda --save ;;
    engine)
      within 480 python benchmarks/engine_gpu.py --only throughput,quant,spec,prompts
      within 90 python benchmarks/speculation_gpu.py
      within 120 python benchmarks/sleep_wake.py --save ;;
    starts) within 240 python benchmarks/engine_gpu.py --only startup ;;
    quant)
      within 240 python benchmarks/quant_gpu.py
      within 100 python benchmarks/kernels_paged.py --save ;;
    *) echo "unknown part '$part': see the top of this file"; exit 2 ;;
  esac
done
