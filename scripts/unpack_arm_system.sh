#!/usr/bin/env bash
# unpack_arm_system.sh FOLDER: Debian's Python and numpy for arm64 in FOLDER/debian (400 MB), for programs under qemu-aarch64. Installs the
# cross compiler, QEMU and debootstrap where they are missing; needs root or sudo for these and for debootstrap.
set -euo pipefail

root=$(realpath -m "$1")
"$(dirname "$0")/install_arm_tools.sh"
unpacked=$root/unpacked-with-cpuinfo # a new name for each change of what is in the folder
if [ -e "$unpacked" ]; then exit 0; fi

as_root=()
if [ "$(id -u)" != 0 ]; then as_root=(sudo --non-interactive); fi
if ! command -v debootstrap >/dev/null; then
  "${as_root[@]}" apt-get install --yes --quiet --no-install-recommends debootstrap debian-archive-keyring
fi

# Only the packages: debootstrap's second stage would run programs for Arm, which this kernel need not know how to start.
rm -rf "${root:?}/debian" && mkdir -p "$root/debian"
"${as_root[@]}" debootstrap --arch=arm64 --download-only --variant=minbase --include=python3-minimal,python3-numpy trixie "$root/packages" \
  http://deb.debian.org/debian /usr/share/debootstrap/scripts/sid > "$root/debootstrap.log"
for package in "$root"/packages/var/cache/apt/archives/*.deb; do dpkg-deb --extract "$package" "$root/debian"; done
"${as_root[@]}" rm -rf "$root/packages"

# QEMU opens files of this folder in the place of the machine's. PyTorch looks up the CPU here, and older QEMUs show the x86-64 one, with
# which it crashes. This one is a Neoverse V1.
mkdir -p "$root/debian/proc"
for ((core = 0; core < $(nproc --all); core++)); do
  printf 'processor\t: %d\nBogoMIPS\t: 100.00\nFeatures\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp i8mm bf16\n' "$core"
  printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0xd40\nCPU revision\t: 1\n\n'
done > "$root/debian/proc/cpuinfo"
touch "$unpacked"
