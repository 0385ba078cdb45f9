#!/usr/bin/env bash
# try_arm_wheel.sh WHEEL [FOLDER]: the extension in a wheel for AArch64 computes the same under QEMU, with Debian's Python and numpy for
# arm64, as this checkout's does here (tests/wheel/extension_bits.py). Debian's packages stay in FOLDER (default: build/arm-system,
# 400 MB). Needs debootstrap, and root for it.
set -euo pipefail

here=$(realpath "$(dirname "$0")/..")
wheel=$(realpath "$1")
root=$(realpath -m "${2:-$here/build/arm-system}")
"$here/scripts/install_arm_tools.sh"

# The second stage of debootstrap would run programs for Arm, which this kernel need not know how to start.
if [ ! -e "$root/unpacked" ]; then
  rm -rf "${root:?}/debian" && mkdir -p "$root"
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3-minimal,python3-numpy trixie "$root/debian" \
    http://deb.debian.org/debian /usr/share/debootstrap/scripts/sid > "$root/debootstrap.log"
  for package in "$root"/debian/var/cache/apt/archives/*.deb; do dpkg-deb --extract "$package" "$root/debian"; done
  touch "$root/unpacked"
fi

rm -rf "${root:?}/wheel"
python3 -m zipfile --extract "$wheel" "$root/wheel"
# Where Debian's alternatives, which the second stage would set up, would point.
libraries=/usr/lib/aarch64-linux-gnu/blas:/usr/lib/aarch64-linux-gnu/lapack
PYTHONPATH="$root/wheel" qemu-aarch64 -E LD_LIBRARY_PATH="$libraries" -L "$root/debian" "$root/debian/usr/bin/python3.13" -P \
  "$here/tests/wheel/extension_bits.py" > "$root/bits.aarch64"
"$here/.venv/bin/python" "$here/tests/wheel/extension_bits.py" > "$root/bits.here"
diff "$root/bits.here" "$root/bits.aarch64"
echo "$(basename "$wheel"): $(wc -l < "$root/bits.aarch64") checksums as on $(uname -m)"
