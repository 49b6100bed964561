#!/usr/bin/env bash
# Bring a virtual environment up from the pinned requirements. Usage: scripts/venv.sh .venv | .venv-protos
# Finds Python 3.11 to 3.13 by itself; PYTHON=... chooses one.
set -euo pipefail
unset CDPATH # with which cd might go elsewhere
cd "$(dirname "$0")/.."
venv=${1:?usage: scripts/venv.sh .venv | .venv-protos}
torch_version=2.13.0+cpu
# PyTorch's own index of CPU builds, asked only if the plain install does not know the build.
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

find_python() {
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "venv: no Python 3.11, 3.12 or 3.13 with the venv module was found (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3}):" \
    "install one, or name it with PYTHON=/path/to/python." >&2
  exit 2
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  echo "venv: making $venv with $("$python" --version)" >&2
  "$python" -m venv "$venv"
fi
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install --progress-bar off)

if [ "$venv" = .venv-protos ]; then
  "${pip[@]}" --no-deps -r requirements/protos.txt
else
  if ! "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch') != '$torch_version')" 2>/dev/null; then
    echo "venv: installing torch $torch_version" >&2
    "${pip[@]}" --no-deps "torch==$torch_version" 2>/dev/null || "${pip[@]}" --no-deps --index-url "$torch_index" "torch==$torch_version"
  fi
  echo "venv: installing the pinned requirements (about two minutes the first time)" >&2
  "${pip[@]}" --no-deps -r requirements/cpu.txt -r requirements/dev.txt
  "${pip[@]}" --no-deps --no-build-isolation --editable .
fi
touch "$venv/.installed"
