#!/usr/bin/env bash
# Runs the tests. bash tests/run.sh [fast | default | slow | all | gpu] [pytest arguments]
#   fast     no Ray, no long ones        default  fast and everything on a local Ray
#   slow     fuzzing, chaos, browser     all      all of the above
#   gpu      what needs a CUDA device; installs nothing, uses $PYTHON (default python3)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
tier=default
case "${1:-}" in fast|default|slow|all|gpu) tier=$1; shift ;; esac

if [ "$tier" = gpu ]; then
  exec "${PYTHON:-python3}" -m pytest -m gpu "$@"
fi
bash jobs/install.sh
# one thread per process: the tests' arithmetic is tiny, and results are compared bit for bit
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false RAY_DEDUP_LOGS=0
run() {  # SELECTION [pytest arguments]; nothing selected is no failure
  .venv/bin/python -m pytest -m "$@" || { code=$?; [ $code = 5 ] || exit $code; }
}
two="-n 2 --dist loadfile"
# what needs no Ray runs two at a time, and so do the long ones if they run alone; a run on a local Ray is several processes by itself
[ $tier = slow ] || run "not slow and not ray and not gpu" $two "$@"
case $tier in
  default) run "ray and not slow and not gpu" "$@" ;;
  slow) run "slow and not gpu" $two "$@" ;;
  all) run "(ray or slow) and not gpu" "$@" ;;
esac
