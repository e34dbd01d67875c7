#!/usr/bin/env bash
# Makes .venv beside this repository and installs requirements.txt into it. Does nothing when that is done already.
#   bash jobs/install.sh            PYTHON=python3.12 picks an interpreter; 3.11 and 3.12 are supported
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv"

works() { "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12)))' 2>/dev/null; }
python=""
for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
  if works "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
  echo "error: Python 3.11 or 3.12 is needed (tried: ${PYTHON:-python3.12 python3.11 python3}); set PYTHON=/path/to/python3.12" >&2
  exit 2
fi

stamp="$(cat "$root/requirements.txt" | cksum) $("$python" -V)"
if [ -f "$venv/.installed" ] && [ "$(cat "$venv/.installed")" = "$stamp" ]; then exit 0; fi

echo "installing requirements.txt into .venv ($("$python" -V))"
[ -x "$venv/bin/python" ] && works "$venv/bin/python" || { rm -rf "$venv"; "$python" -m venv "$venv"; }
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
"$venv/bin/python" "$root/jobs/support/download_size.py" "$root/requirements.txt" || true  # only information
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.txt"
printf '%s' "$stamp" > "$venv/.installed"
