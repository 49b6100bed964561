#!/usr/bin/env bash
# Regenerate the stubs beside the protos (default), or with --check fail if the committed ones differ.
# Generated with the oldest supported toolchain, so that they import on protobuf 6.33.5 and later (docs/adr/0001).
set -euo pipefail
unset CDPATH # with which cd might go elsewhere
cd "$(dirname "$0")/.."
python=${PROTOS_PYTHON:-.venv-protos/bin/python}
out=protos
if [ "${1:-}" = "--check" ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc -I protos \
  --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" \
  protos/fermata/v1/*.proto
if [ "${1:-}" = "--check" ]; then
  status=0
  for made in "$out"/fermata/v1/*; do
    if ! diff -u "protos/fermata/v1/$(basename "$made")" "$made" >&2; then status=1; fi
  done
  if [ $status -ne 0 ]; then
    echo "protos: the committed stubs are not what protos/fermata/v1/*.proto gives: run 'make protos' and commit." >&2
  fi
  exit $status
fi
