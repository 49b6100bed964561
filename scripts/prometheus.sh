#!/usr/bin/env bash
# Print the path of a Prometheus server, with promtool beside it: the one on PATH, else Debian's unpacked into .tools/.
# Needs no root and changes nothing outside .tools/. Packages are checked against Debian's signatures by apt itself.
set -euo pipefail
unset CDPATH # with which cd might go elsewhere, and print it
cd "$(dirname "$0")/.."
tools=$PWD/.tools
unpacked=$tools/prometheus/usr/bin/prometheus

usable() { [ -x "$1" ] && [ -x "$(dirname "$1")/promtool" ]; }

on_path=$(type -P prometheus || true)
case $on_path in "" | /*) ;; *) on_path=$PWD/$on_path ;; esac # a PATH with "." in it
if [ -n "$on_path" ] && usable "$on_path"; then
  echo "$on_path"
  exit
fi
if usable "$unpacked"; then
  echo "$unpacked"
  exit
fi

fail() {
  echo "prometheus: $1: install Prometheus 2.40 or later, so that prometheus and promtool are on PATH." >&2
  exit 3
}

command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
  fail "none is on PATH, and this is no Debian whose package could be unpacked"

mkdir -p "$tools" 2>/dev/null && work=$(mktemp -d "$tools/prometheus.XXXXXX" 2>/dev/null) ||
  fail "none is on PATH, and nothing can be written to $tools"
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt fetches as a user of its own where it is run by root
patient=(-q -o Acquire::Retries=3 -o Acquire::http::Timeout=30)
fetch() { (cd "$work" && apt-get "${patient[@]}" "$@" download prometheus) >"$work/log" 2>&1; }

# Package lists may be missing or old: then some are fetched for this folder alone.
lists=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
refresh() {
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
  apt-get "${patient[@]}" "${lists[@]}" update >"$work/log" 2>&1
}
echo "prometheus: fetching Debian's package into .tools/ (20 MB)" >&2
if ! fetch && ! { refresh && fetch "${lists[@]}"; }; then
  fail "none is on PATH, and apt-get could not download the package ($(grep -m 1 '^[EW]:' "$work/log" || tail -n 1 "$work/log"))"
fi
dpkg -x "$work"/prometheus_*.deb "$work/unpacked" 2>"$work/log" ||
  fail "Debian's package could not be unpacked ($(tail -n 1 "$work/log"))"
usable "$work/unpacked/usr/bin/prometheus" || fail "Debian's package has no promtool beside prometheus"
# Whole or not at all, and once: whoever looks meanwhile sees no half of it, and one that was quicker is let be.
if ! usable "$unpacked"; then
  rm -rf "$tools/prometheus"
  mv "$work/unpacked" "$tools/prometheus"
fi
echo "$unpacked"
