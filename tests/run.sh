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
case $tier in
  fast) select="not slow and not ray and not gpu" ;;
  default) select="not slow and not gpu" ;;
  slow) select="slow and not gpu" ;;
  all) select="not gpu" ;;
esac
# one thread per process: the tests' arithmetic is tiny, and results are compared bit for bit
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false RAY_DEDUP_LOGS=0
# two at a time: most of a test on a local Ray is waiting for processes to start
exec .venv/bin/python -m pytest -n 2 --dist loadfile -m "$select" "$@"
