"""Restricts a sandboxed process to the system calls for computing, memory and its one socket; all others fail with
EPERM. Input that escapes from Jinja's sandbox or exploits a library can then not open, delete, signal, trace or
start anything, even as root, whom RLIMIT_NOFILE alone would not stop.

Uses a seccomp filter: https://docs.kernel.org/userspace-api/seccomp_filter.html.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from typing import Final

# System call numbers on x86-64 and on AArch64 (asm/unistd_64.h, asm-generic/unistd.h); -1: does not exist there.
_ALLOWED: Final[dict[str, tuple[int, int]]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "poll": (7, -1), "lseek": (8, 62),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "nanosleep": (35, 101), "getpid": (39, 172), "sendto": (44, 206), "recvfrom": (45, 207),
    "exit": (60, 93), "uname": (63, 160), "gettimeofday": (96, 169), "getrusage": (98, 165), "times": (100, 153),
    "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, -1), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "restart_syscall": (219, 128), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "ppoll": (271, 73),
    "getrandom": (318, 278), "membarrier": (324, 283), "rseq": (334, 293),
}  # fmt: skip
_MACHINES: Final = {
    "x86_64": (0, 0xC000003E, 317),
    "aarch64": (1, 0xC00000B7, 277),
}  # machine → (column of _ALLOWED, AUDIT_ARCH, number of the seccomp call)

_PR_SET_NO_NEW_PRIVS: Final = 38  # <linux/prctl.h>
_SECCOMP_SET_MODE_FILTER: Final = 1  # <linux/seccomp.h>
_SECCOMP_FILTER_FLAG_TSYNC: Final = 1  # all threads
_REFUSED: Final = 0x00050000 | errno.EPERM  # SECCOMP_RET_ERRNO
_PASSED: Final = 0x7FFF0000  # SECCOMP_RET_ALLOW
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # classic BPF: 32-bit load, jump, return
_AT_NUMBER, _AT_ARCH = 0, 4  # in struct seccomp_data

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def restrict() -> bool:
    """Installs the filter for all threads of this process, irrevocably. Returns False if the kernel or the
    architecture is not supported."""
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    column, arch, seccomp = machine
    program = _program(column, arch)
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    described = _Program(len(program), code)
    given = (ctypes.c_long(seccomp), ctypes.c_ulong(_SECCOMP_SET_MODE_FILTER))
    done: int = libc.syscall(*given, ctypes.c_ulong(_SECCOMP_FILTER_FLAG_TSYNC), ctypes.byref(described))
    return done == 0


def _program(column: int, arch: int) -> list[_Instruction]:
    passed, refused = (_RETURN, 0, 0, _PASSED), (_RETURN, 0, 0, _REFUSED)
    program = [(_LOAD, 0, 0, _AT_ARCH), (_JUMP_IF_EQUAL, 1, 0, arch), refused, (_LOAD, 0, 0, _AT_NUMBER)]
    for numbers in _ALLOWED.values():
        if numbers[column] >= 0:
            program += [(_JUMP_IF_EQUAL, 0, 1, numbers[column]), passed]
    return [*program, refused]
