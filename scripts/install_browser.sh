#!/usr/bin/env bash
# Chromium, for the tests of the web pages: installs it where apt can. They are skipped where there is none, but
# not in CI, where they fail.
set -euo pipefail

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then exit 0; fi
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  install=(apt-get install --yes --quiet --no-install-recommends chromium fonts-dejavu-core)
  "${install[@]}" || { apt-get update --quiet && "${install[@]}"; } || echo "note: apt has no Chromium" >&2
else
  echo "note: without Chromium the tests of the web pages are skipped: sudo apt install chromium" >&2
fi
