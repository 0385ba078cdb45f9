#!/usr/bin/env bash
# try_arm_wheel.sh WHEEL [FOLDER]: the extension in a wheel for AArch64 computes the same under QEMU, with Debian's Python and numpy for
# arm64, as this checkout's does here (tests/wheel/extension_bits.py). Debian's packages stay in FOLDER (default: build/arm-system).
set -euo pipefail

here=$(realpath "$(dirname "$0")/..")
wheel=$(realpath "$1")
root=$(realpath -m "${2:-$here/build/arm-system}")
"$here/scripts/unpack_arm_system.sh" "$root"

rm -rf "${root:?}/wheel"
python3 -m zipfile --extract "$wheel" "$root/wheel"
# Where Debian's alternatives, which the second stage would set up, would point.
libraries=/usr/lib/aarch64-linux-gnu/blas:/usr/lib/aarch64-linux-gnu/lapack
PYTHONPATH="$root/wheel" qemu-aarch64 -E LD_LIBRARY_PATH="$libraries" -L "$root/debian" "$root/debian/usr/bin/python3.13" -P \
  "$here/tests/wheel/extension_bits.py" > "$root/bits.aarch64"
"$here/.venv/bin/python" "$here/tests/wheel/extension_bits.py" > "$root/bits.here"
diff "$root/bits.here" "$root/bits.aarch64"
echo "$(basename "$wheel"): $(wc -l < "$root/bits.aarch64") checksums as on $(uname -m)"
