#!/usr/bin/env bash
# Make the README's pictures from a real run of the demo. Usage: scripts/pictures.sh [RUN_DIR]
# Without RUN_DIR the demo is run first (a few minutes).
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/pictures}
if [ $# -eq 0 ]; then
  make demo ARGS="--name pictures"
fi
mkdir -p docs/pictures
cp "$run/timeline.png" "$run/learning_curve.png" docs/pictures/
echo "docs/pictures: from $run" >&2
