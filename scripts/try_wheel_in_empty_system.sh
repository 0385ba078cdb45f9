#!/usr/bin/env bash
# try_wheel_in_empty_system.sh WHEEL [SUITE]: installs a wheel into a bare Debian (forky: Python 3.14, trixie: 3.13, bookworm: 3.11)
# that has Python and no compiler, and asks it a question. What the wheel needs comes from PyPI: gigabytes, for PyTorch's build there
# has CUDA's libraries. Needs root and debootstrap; the system goes with the command.
set -euo pipefail

wheel=$(realpath "$1")
suite=${2:-forky}
here=$(realpath "$(dirname "$0")/..")
root=$(mktemp -d /tmp/moeserve-empty-system.XXXXXX)
trap 'rm -rf --one-file-system "$root"' EXIT

scripts=/usr/share/debootstrap/scripts
script=$scripts/$suite
[ -e "$script" ] || script=$scripts/sid # suites that are newer than debootstrap
debootstrap --variant=minbase --include=python3-venv,ca-certificates "$suite" "$root" http://deb.debian.org/debian "$script" > "$root.log" ||
  { tail -n 5 "$root.log" >&2; exit 1; }
rm -f "$root.log"
cp "$wheel" "$here/tests/wheel/answer_a_question.py" "$root/root/"
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" # with the machine's own, where it has any
export root

# A namespace of its own for mounts: they end with it, before the folder is removed.
unshare --mount --propagation private bash -euc '
  mount -t proc proc "$root/proc"
  mount --rbind /dev "$root/dev"
  chroot "$root" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin PIP_CERT=/etc/ssl/certs/ca-certificates.crt bash -euc "
    cd /root
    if command -v cc c++ gcc g++ clang make; then exit 1; fi
    python3 -m venv moeserve
    moeserve/bin/pip install --quiet --only-binary=:all: ./*.whl
    moeserve/bin/python answer_a_question.py
  "
'
