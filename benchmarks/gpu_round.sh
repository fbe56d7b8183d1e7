#!/bin/bash
# Every check and figure that needs a GPU, each within a hard limit, the short ones first; about 35 minutes on one H200.
#
#   benchmarks/gpu_round.sh [tests|parallel|checkpoint|tune|kernels|train|loss|plan|engine|quant …]     all without an argument
#
# `tune` tries tiles, whose best are then set by hand; `kernels` records who is fastest here, which `train` and `loss` then use: in this order.
# Results go to benchmarks/results/; `timeout -k` ends even what catches the first signal (a trainer finishes its step).
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=src:benchmarks PYTHONUNBUFFERED=1
within() { local limit=$1; shift; timeout -k 5 "$limit" "$@" || echo "failed or out of time ($?): $*"; }
test_file() { within 150 python -m pytest -q -m gpu --tb=short -p no:cacheprovider "$1" > "/tmp/gpu-$(basename "$1").txt" 2>&1; }

[ $# -gt 0 ] || set -- tests parallel checkpoint tune kernels train loss plan engine quant
for part in "$@"; do
  echo "== $part, $(date +%T)"
  case $part in
    tests)  # side by side: compiling kernels is what takes time
      for file in tests/gpu/test_*.py; do test_file "$file" & done; wait
      tail -n 12 /tmp/gpu-test_*.txt ;;
    parallel) within 120 torchrun --nproc-per-node 1 benchmarks/parallel_gpu.py --save ;;
    checkpoint) within 90 python benchmarks/checkpoint_gpu.py --save ;;
    tune)
      within 190 python benchmarks/flash_tune.py --save
      within 150 python benchmarks/loss_tune.py
      within 150 python benchmarks/elementwise_gpu.py ;;
    kernels) within 240 python -m lmworks bench kernels --record --out benchmarks/results/kernels_train.json ;;
    train) within 600 python benchmarks/train_gpu.py ;;
    loss) within 240 python benchmarks/loss_gpu.py ;;
    plan) within 200 python benchmarks/plan_check.py --device cuda --save ;;
    engine) for model in qwen3-0.6b llama3-8b; do within 200 python benchmarks/engine_gpu.py --model $model; done ;;
    quant) within 150 python benchmarks/quant_gpu.py ;;
    *) echo "unknown part '$part': see the top of this file"; exit 2 ;;
  esac
done
