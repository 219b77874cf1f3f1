"""The stand-in library: compiled once into a directory, and steered while programs use it.

Whoever runs with ``environment`` finds it in place of NVIDIA's: the loader takes ``LD_LIBRARY_PATH`` as it was when the
program started, so it must be set then.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tokengap.errors import SetupError
from tokengap.lab.nvml.profiles import GPU_IS_LOST, FakeGpu

SONAME = "libnvidia-ml.so.1"

#: Calls can be asked for of every GPU.
EVERY = -1


def compile_library(directory: Path, *, without: Iterable[str] = ()) -> Path:
    """Compile the library into a directory; functions in ``without`` do not exist in it. Raises SetupError."""
    source = Path(__file__).with_name("fake_nvml.c")
    library = directory / SONAME
    hidden = directory / "hidden.map"
    hidden.write_text("{ local: " + " ".join(f"{name};" for name in without) + " };\n")
    command = ["gcc", "-std=gnu11", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{SONAME}"]
    if without:
        command.append(f"-Wl,--version-script,{hidden}")
    try:
        subprocess.run([*command, "-o", library, source], check=True, capture_output=True, text=True)  # noqa: S603 - the compiler on PATH, with our own file
    except FileNotFoundError:
        raise SetupError("gcc is missing; as root: apt-get install -y gcc libc6-dev") from None
    except subprocess.CalledProcessError as error:
        first = (error.stderr or "no message").splitlines()[0]
        raise SetupError(
            f"the stand-in for NVML does not compile (apt-get install -y gcc libc6-dev): {first}"
        ) from None
    return library


@dataclass
class FakeNvml:
    """A host's GPUs, as a compiled library tells of them. Change what it should say, then :meth:`write`.

    ``init`` is what initialising answers. ``count`` overrides the number of GPUs. ``directives`` are further lines of
    the control file, see the head of ``fake_nvml.c``; the methods add the usual ones.
    """

    library: Path
    control: Path
    gpus: tuple[FakeGpu, ...] = ()
    init: int = 0
    count: int | None = None
    driver: str = "590.48.01"
    directives: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _xids: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """Our environment, in which programs find this library. Only for programs that are started with it."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.library.parent),
            "FAKE_NVML_CONTROL": str(self.control),
        }

    def write(self) -> None:
        """Let it say what now stands here, from the next call on."""
        lines = [f"init {self.init}", f"driver {self.driver}"]
        for index, gpu in enumerate(self.gpus):
            lines += self._lines(index, gpu)
        lines += self.directives
        if self.count is not None:
            lines.append(f"count {self.count}")
        new = self.control.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self.control)

    def set(self, *gpus: FakeGpu) -> None:
        """Have these GPUs."""
        self.gpus = gpus
        self.write()

    def say(self, *directives: str) -> None:
        """Replace the directives."""
        self.directives = list(directives)
        self.write()

    def lose(self, index: int, code: int = GPU_IS_LOST, *, after: float = 0.0) -> None:
        """Have every call for one GPU fail, in so many seconds."""
        self.say(*self.directives, f"lose {index} {code} {time.monotonic() + after:.3f}")

    def hang(self, call: str, mode: str = "sleep", index: int = EVERY) -> None:
        """Have one call not return. ``stop`` and ``disk`` are for hangs that only SIGKILL ends."""
        self.say(*self.directives, f"hang {call} {mode} {index}")

    def segfault(self, call: str, index: int = EVERY) -> None:
        """Have one call crash its caller."""
        self.say(*self.directives, f"segfault {call} {index}")

    def xid(self, index: int, code: int) -> None:
        """Report an error of a GPU to whoever waits for one."""
        self._xids += 1
        self.say(*self.directives, f"xid {self._xids} {index} {code}")

    def _lines(self, index: int, gpu: FakeGpu) -> Iterable[str]:
        values = {
            "uuid": gpu.uuid,
            "pci": gpu.pci,
            "memory_total": gpu.memory_total,
            "memory_used": gpu.memory_used,
            "memory_reserved": gpu.memory_reserved,
            "power_mw": round(gpu.power * 1e3),
            "energy_mj": round(gpu.energy * 1e3),
            "energy_since": f"{self._began:.3f}" if gpu.energy else 0,
            "utilization": gpu.utilization,
            "temperature": gpu.temperature,
            "sm_mhz": gpu.sm_mhz,
            "reasons": gpu.reasons,
            "sw_thermal_ns": round(gpu.sw_thermal * 1e9),
            "hw_thermal_ns": round(gpu.hw_thermal * 1e9),
            "power_brake_ns": round(gpu.power_brake * 1e9),
            "ecc_uncorrectable": gpu.ecc_uncorrectable,
            "remap_failure": int(gpu.remap_failure),
            "remap_pending": int(gpu.remap_pending),
            "recovery_action": gpu.recovery_action,
            "pcie_replays": gpu.pcie_replays,
            "mig": int(gpu.mig),
        }
        yield f"name {index} {gpu.name}"
        for key, value in values.items():
            yield f"gpu {index} {key} {value}"
        for pid, memory in gpu.processes.items():
            yield f"process {index} {pid} {memory}"
        for number, instance in enumerate(gpu.instances):
            yield f"mig {index} {instance.uuid} {instance.memory_total} {instance.memory_used}"
            for pid, memory in instance.processes.items():
                yield f"migprocess {index} {number} {pid} {memory}"
        for call, code in gpu.refuse.items():
            yield f"refuse {call} {code} {index}"
