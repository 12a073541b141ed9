"""The compiled op library: where it lies and which instruction set it chose. FORMAT.md states the ops' contracts."""

import ctypes
import os
from functools import cache
from pathlib import Path

from cascade.errors import StepwellError

LIBRARY_NAME = "libstepwell_ops.so"
ISAS = ("portable", "avx2", "avx512vnni", "amx", "amx-emulated")
"""What STEPWELL_ISA may name, where the machine has it; `amx-emulated` is for tests."""


def library_path() -> Path:
    """Path of the op library: what STEPWELL_OPS_LIBRARY names (`make sanitize` does), or else the installed one.

    Raises StepwellError when it is not there: the package was not compiled.
    """
    if named := os.environ.get("STEPWELL_OPS_LIBRARY"):
        if not Path(named).is_file():
            raise StepwellError(f"STEPWELL_OPS_LIBRARY names {named}, which is not a file")
        return Path(named)
    path = Path(__file__).parent / LIBRARY_NAME
    if not path.is_file():
        raise StepwellError(f"{path} is missing: install the package with `pip install .`, which compiles it")
    return path


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_path()))
    library.stepwell_isa.restype = ctypes.c_char_p
    library.stepwell_isa_available.argtypes = [ctypes.c_char_p]
    return library


def isa() -> str:
    """The ISA of a session created now. Raises StepwellError when STEPWELL_ISA names one that is not there."""
    name = _library().stepwell_isa()
    if name is None:
        raise StepwellError(f"STEPWELL_ISA is not one of this machine's: {', '.join(available_isas())}")
    return str(name.decode())


def available_isas() -> list[str]:
    """The ISAs that STEPWELL_ISA may name on this machine."""
    return [name for name in ISAS if _library().stepwell_isa_available(name.encode())]
