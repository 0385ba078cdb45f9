#!/usr/bin/env bash
# prepare_arm_server.sh WHEEL [FOLDER]: all that a wheel for AArch64 depends on, and FOLDER/python (default: build/arm-system), a Python with
# it under qemu-aarch64. Its `sys.executable` is that script, so that the server's processes start one another in the same way.
#
# PyTorch is the newest build that pyproject.toml allows; UV_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu has one without CUDA, whose
# libraries take 4 GB and minutes at each start here. ARM_TORCH=torch==2.10.0 chooses a version, such as the last without CUDA on PyPI.
set -euo pipefail

here=$(realpath "$(dirname "$0")/..")
wheel=$(realpath "$1")
root=$(realpath -m "${2:-$here/build/arm-system}")
"$here/scripts/unpack_arm_system.sh" "$root"

test -d "$root/uv" || python3 -m venv "$root/uv"
"$root/uv/bin/pip" install --quiet uv
echo "${ARM_TORCH:-}" > "$root/override.txt"
rm -rf "$root/site" "$root/starter" "$root/wheel"
UV_INDEX_STRATEGY=unsafe-best-match "$root/uv/bin/uv" pip install --quiet --no-python-downloads --python-platform aarch64-manylinux_2_40 \
  --python-version 3.13 --only-binary :all: --override "$root/override.txt" --target "$root/site" --requirements "$here/pyproject.toml"
python3 -m zipfile --extract "$wheel" "$root/wheel"

mkdir -p "$root/starter"
printf 'import sys\n\nsys.executable = "%s"\n' "$root/python" > "$root/starter/sitecustomize.py"
cat > "$root/python" <<END
#!/bin/bash
export PYTHONPATH="$root/starter:$root/wheel:$root/site"
# Where Debian's alternatives, which its installation would set up, would point.
exec qemu-aarch64 -E LD_LIBRARY_PATH=/usr/lib/aarch64-linux-gnu/blas:/usr/lib/aarch64-linux-gnu/lapack -L "$root/debian" \\
  "$root/debian/usr/bin/python3.13" "\$@"
END
chmod +x "$root/python"
