#!/usr/bin/env bash
# A cross compiler for AArch64 and QEMU's user mode, for `make test-arm`: installs them where apt can without a password.
set -euo pipefail

if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then exit 0; fi

packages=(g++-aarch64-linux-gnu qemu-user)
as_root=()
if [ "$(id -u)" != 0 ]; then as_root=(sudo --non-interactive); fi
if ! command -v apt-get >/dev/null || ! "${as_root[@]}" true 2>/dev/null; then
  echo "error: the cross compiler or QEMU is missing: sudo apt install ${packages[*]}" >&2
  exit 1
fi
install=("${as_root[@]}" apt-get install --yes --quiet --no-install-recommends "${packages[@]}" libc6-dev-arm64-cross)
"${install[@]}" || { "${as_root[@]}" apt-get update --quiet && "${install[@]}"; }
