"""`python -m moeserve.cli.doctor.probes extension|gpu`: checks that may crash, hang or load gigabytes, in a process of
their own.

The process prints the findings as a list of JSON objects. If torch or the C++ extension was built for another CPU, a
signal ends the process, and the parent process reports it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from signal import Signals
from typing import Final

from moeserve.cli.doctor.finding import Finding
from moeserve.processes.gpu_driver import driver_version

DEADLINE_S: Final = 120.0  # Triton compiles, torch is read from a slow disk
REINSTALL: Final = "install moeserve again on this machine: pip install --force-reinstall --no-deps moeserve"
_MOST_SHOWN: Final = 300  # characters shown of a library's message


def run_probe(name: str, deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Returns the findings of the probe's process; a single error if it ended without any."""
    command = [sys.executable, "-P", "-m", __name__, name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        text = f"the check did not end within {deadline_s:g} s"
        return [Finding(name, "error", text, "see nvidia-smi and dmesg for a device or a disk that hangs")]
    if ended.returncode == 0:
        return [Finding(**one) for one in json.loads(ended.stdout.splitlines()[-1])]
    if ended.returncode < 0:
        text = f"the check was ended by {Signals(-ended.returncode).name}"
    else:
        text = f"the check failed: {shortened(ended.stderr)}"
    return [Finding(name, "error", text, REINSTALL)]


def shortened(text: str) -> str:
    """Returns the last line of a message that is not empty, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_MOST_SHOWN] if lines else "it says nothing"


def extension() -> Iterator[Finding]:
    """Checks the C++ kernels, and reports the instruction set that they choose."""
    try:
        import torch  # whose libraries the extension needs

        from moeserve.kernels import _C
    except ImportError as error:
        yield Finding("extension", "error", f"cannot be loaded: {error}", REINSTALL)
        return
    yield Finding("extension", "ok", f"the C++ kernels are loaded, with PyTorch {torch.__version__}")
    isa = _C.Stream([(0, [])]).isa
    if isa == "plain":
        yield Finding(
            "CPU",
            "warning",
            "neither AVX2 nor Arm's dot products: the kernels are plain C++, several times slower",
            "use an x86-64 CPU of 2013 or later, or an Arm CPU with asimddp (Armv8.2); in a virtual machine pass the "
            "host's CPU through (-cpu host)",
        )
    else:
        yield Finding("CPU", "ok", f"the kernels use {isa}")


def gpu() -> Iterator[Finding]:
    """Checks the driver, the GPUs, PyTorch's build, and a kernel that Triton compiles."""
    driver = driver_version()
    if driver is None and not _has_nvidia_device():
        yield Finding("GPU", "ok", "no NVIDIA GPU here: the CPU computes")
        return
    if driver is None:
        yield Finding(
            "GPU",
            "warning",
            "there is an NVIDIA GPU, but no driver of NVIDIA's is loaded: the CPU computes",
            "install the driver (Ubuntu: sudo ubuntu-drivers install); in a container: docker run --gpus all",
        )
        return
    yield Finding("driver", "ok", f"NVIDIA {driver}")
    import torch

    from moeserve.worker.loading.device import gpu_obstacle

    if (obstacle := gpu_obstacle()) is not None:
        yield Finding("GPU", "warning", obstacle.text, "until then the CPU computes")
        return
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        free, total = torch.cuda.mem_get_info(number)
        yield Finding(
            "GPU",
            "ok",
            f"{number}: {torch.cuda.get_device_name(number)}, compute capability {major}.{minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, PyTorch for CUDA {torch.version.cuda}",
        )
    yield check_triton("cuda")


def check_triton(device: str) -> Finding:
    """Compiles a kernel and runs it."""
    from moeserve.cli.doctor.triton_kernel import doubles

    try:
        is_right = doubles(device)
    except Exception as error:  # noqa: BLE001  (whatever a compiler says is what the user has to read)
        return Finding(
            "Triton",
            "error",
            f"a kernel cannot be compiled: {shortened(str(error))}",
            "install a C compiler and Python's headers (Debian, Ubuntu: sudo apt install gcc python3-dev), or run with "
            "--device cpu",
        )
    if is_right:
        return Finding("Triton", "ok", "compiles and runs kernels")
    return Finding(
        "Triton",
        "error",
        "a kernel computed wrong numbers",
        "pip install --force-reinstall triton; --device cpu works",
    )


def _has_nvidia_device(root: Path = Path("/")) -> bool:
    """Returns whether PCI has a display controller of NVIDIA's."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


PROBES: Final[dict[str, Callable[[], Iterator[Finding]]]] = {"extension": extension, "gpu": gpu}

if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in PROBES[sys.argv[1]]()]))
