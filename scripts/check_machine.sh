#!/usr/bin/env bash
# Says what is missing before the set-up begins, and how to get it: check_machine.sh [PYTHON]
set -euo pipefail

python=${1:-python3}
cxx=${CXX:-g++}
missing=0

need() { # need "what is wrong" "remedy"
  echo "error: $1" >&2
  echo "       $2" >&2
  missing=1
}

python_can() { "$python" -c "$1" >/dev/null 2>&1; }

if ! command -v "$python" >/dev/null; then
  need "$python was not found" "install Python 3.11 or newer: sudo apt install python3 python3-venv python3-dev"
elif ! python_can 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  need "$("$python" --version 2>&1) is too old: moeserve needs Python 3.11 or newer" \
    "install one and name it: make serve PYTHON=python3.11"
else
  python_can 'import venv, ensurepip' ||
    need "$python cannot make virtual environments" "sudo apt install python3-venv"
  python_can 'import sysconfig, os; os.stat(sysconfig.get_path("include") + "/Python.h")' ||
    need "the C headers of $python are missing" "sudo apt install python3-dev"
fi

if ! command -v "$cxx" >/dev/null; then
  need "no C++ compiler: $cxx was not found" "sudo apt install g++"
else
  # clang answers -dumpversion too; its first C++20 release that serves us is 14.
  version=$("$cxx" -dumpversion)
  oldest=11
  if "$cxx" --version | grep -qi clang; then oldest=14; fi
  if [ "${version%%.*}" -lt "$oldest" ]; then
    need "$cxx $version is too old: moeserve needs g++ 11 or clang++ 14, or newer" \
      "sudo apt install g++-11, then: CXX=g++-11 make serve"
  fi
fi

exit "$missing"
