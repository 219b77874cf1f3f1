"""Calls into NVIDIA's library, and what its errors mean."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tokengap.gpu_readings import GpuReason

# nvmlReturn_t of nvml.h, by the word for it
CODES: Final[Mapping[int, str]] = {
    1: "uninitialized",
    2: "invalid_argument",
    3: "not_supported",
    4: "no_permission",
    6: "not_found",
    8: "insufficient_power",
    9: "driver_not_loaded",
    10: "timeout",
    11: "irq_issue",
    12: "library_not_found",
    13: "function_not_found",
    14: "corrupted_inforom",
    15: "lost",
    16: "reset_required",
    18: "version_mismatch",
    19: "in_use",
    21: "no_data",
    25: "argument_version_mismatch",
    26: "deprecated",
    27: "not_ready",
    28: "gpu_not_found",
    999: "unknown",
}

#: Never asked again of this GPU: to ask on can fill the kernel's log (nvidia_gpu_exporter 384).
PERMANENT: Final = frozenset(
    {"not_supported", "no_permission", "function_not_found", "deprecated", "argument_version_mismatch"}
)
#: The GPU is gone, whatever else is asked of it.
GONE: Final = frozenset({"lost", "reset_required", "gpu_not_found"})
#: The driver is gone, or another one: only a new process helps.
OVER: Final[Mapping[str, GpuReason]] = {
    "uninitialized": "failed",
    "driver_not_loaded": "driver_not_loaded",
    "version_mismatch": "version_mismatch",
    "library_not_found": "library_not_found",
}
#: What initialising may answer besides.
REFUSED: Final[Mapping[str, GpuReason]] = {**OVER, "no_permission": "no_permission"}
HINTS: Final[Mapping[str, str]] = {
    "version_mismatch": "the driver was upgraded and not reloaded: reboot, or unload and load its modules",
    "unknown": "in a container this means that it lost its devices, as after systemctl daemon-reload: start a new one",
    "no_permission": "this user may not open /dev/nvidiactl",
}

# The member of nvmlValue_t by nvmlValueType_t
VALUES: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

#: nvmlProcessInfo_v2_t and _v3_t of every driver. The binding 12.535.77 has five fields and reads nonsense.
PROCESS_BYTES: Final = 24


class Refused(Exception):
    """A call was refused; ``word`` says why. The library's own text is never asked for: it is a call."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


class GpuGone(Refused):
    """The GPU that was asked is lost."""


class Over(Refused):
    """There is no driver to ask any more."""


class Nvml:
    """Calls by the name of the binding's function, errors as :class:`Refused`.

    The binding is a module that others provide as well; a function that it, or the library, lacks is one more refusal.
    """

    def __init__(self, binding: Any) -> None:
        self._binding = binding
        self._errors = (binding.NVMLError, getattr(binding, "NVMLLibraryMismatchError", binding.NVMLError))

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call; raises Refused, GpuGone or Over."""
        function = getattr(self._binding, name, None)
        if function is None:
            raise Refused("function_not_found")
        try:
            return function(*arguments)
        except self._errors as error:
            # A mismatch of library and binding is an error without a code.
            raise refusal(getattr(error, "value", 13)) from None
        except UnicodeDecodeError:
            raise Refused("not_text") from None

    def fields(self, device: Any, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], float | Refused]:
        """Ask for field values, many in one call; each has its own answer."""
        asked = list(wanted)
        answers: dict[tuple[int, int], float | Refused] = {}
        for key, value in zip(asked, self("nvmlDeviceGetFieldValues", device, asked), strict=True):
            if value.nvmlReturn:
                answers[key] = refusal(value.nvmlReturn)
            elif value.valueType < len(VALUES):
                answers[key] = float(getattr(value.value, VALUES[value.valueType]))
            else:
                answers[key] = Refused("not_a_number")
        return answers

    @property
    def reads_processes(self) -> bool:
        """Whether the binding's struct is the driver's, so that a second process is read right."""
        struct = getattr(self._binding, "c_nvmlProcessInfo_t", None)
        return struct is None or ctypes.sizeof(struct) == PROCESS_BYTES


def refusal(code: int) -> Refused:
    """Return the error for a code of the library."""
    word = CODES.get(code, f"error_{code}")
    return (GpuGone if word in GONE else Over if word in OVER else Refused)(word)


def key_of(handle: Any) -> int:
    """Return what tells one of the library's handles from another."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


class Absent(Exception):
    """There are no GPUs to read; the reason, and a sentence."""

    def __init__(self, reason: GpuReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: GpuReason = reason
        self.detail = detail


def load_binding() -> Nvml:
    """Load the binding. Raises Absent where it is missing, or where another package stands in its place."""
    try:
        import pynvml  # late: it may be missing, or another
    except ImportError as error:
        raise Absent("wrong_binding", f"the package nvidia-ml-py cannot be loaded: {error}") from None
    if hasattr(pynvml, "nvmlInitWithFlags") and hasattr(pynvml, "NVMLError"):
        return Nvml(pynvml)
    from importlib import metadata  # late: it is slow to load, and needed here only

    culprits = []
    for package in ("pynvml", "nvidia-ml-py3"):
        try:
            culprits.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    raise Absent(
        "wrong_binding",
        f"the module pynvml at {pynvml.__file__} is not that of nvidia-ml-py but of "
        f"{' or '.join(culprits) or 'another package'}: pip uninstall pynvml nvidia-ml-py3, then pip install "
        "--force-reinstall nvidia-ml-py",
    )


def absent(word: str, doing: str) -> Absent:
    """Return why there are no GPUs, after an error of the whole library."""
    hint = f": {HINTS[word]}" if word in HINTS else ""
    return Absent(REFUSED.get(word, "failed"), f"NVML, {doing}: {word}{hint}")
