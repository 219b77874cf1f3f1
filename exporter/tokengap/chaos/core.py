"""The core of a stand-in engine, a process of its own as vLLM's is: ``python -m tokengap.chaos.core``.

It is a heart and no more: it beats into a pipe, and its front end (:mod:`tokengap.chaos.replica`) generates only while
it beats. So it can be killed and stopped as a real one is, and what follows is what follows on a real one. It bears the
name under which vLLM's shows in the process tree.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Never

#: What vLLM calls its core process; the kernel keeps the first 15 bytes.
NAME = "VLLM::EngineCore"

#: Seconds between two beats.
EVERY = 0.05

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


def beat(pipe: int) -> Never:
    """Beat until killed, or until nobody reads the pipe any more."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, NAME.encode())
    # Stopped, it would not notice that its front end is gone.
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    while True:
        try:
            os.write(pipe, b".")
        except BrokenPipeError:
            sys.exit()
        time.sleep(EVERY)


if __name__ == "__main__":
    beat(sys.stdout.fileno())
