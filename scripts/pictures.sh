#!/usr/bin/env bash
# Make the README's pictures from a real run of the demo. Usage: scripts/pictures.sh [RUN_DIR]
# Without RUN_DIR the demo is run first, under a Prometheus whose answers the picture of the dashboard is drawn from (a
# few minutes). With one, the dashboard is drawn again where RUN_DIR/prometheus holds what such a Prometheus stored.
set -euo pipefail
unset CDPATH # with which cd might go elsewhere
cd "$(dirname "$0")/.."
run=${1:-runs/pictures}
mkdir -p docs/pictures
if [ $# -eq 0 ]; then
  make .venv/.installed
  .venv/bin/python scripts/dashboard_picture.py --run "$run" docs/pictures/dashboard.png
elif [ -d "$run/prometheus" ]; then
  .venv/bin/python scripts/dashboard_picture.py "$run" docs/pictures/dashboard.png
fi
cp "$run/timeline.png" "$run/learning_curve.png" docs/pictures/
echo "docs/pictures: from $run" >&2
