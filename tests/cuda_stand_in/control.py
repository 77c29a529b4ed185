"""What a test may do to the stand-in: inject faults, limit memory, reseed unordered work."""

from __future__ import annotations

import ctypes


class StandIn:
    """The entry points of the stand-in that no CUDA runtime has."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcudart.so.13")
        self._library.stand_in_used.restype = ctypes.c_size_t
        self._library.stand_in_limit_memory.argtypes = [ctypes.c_size_t]
        self._library.stand_in_poison_up_to.argtypes = [ctypes.c_size_t]
        self._library.stand_in_other_process.argtypes = [ctypes.c_int, ctypes.c_longlong]
        self._library.stand_in_calls.restype = ctypes.c_long

    def inject(self, call: str, error: int, skip: int = 0) -> None:
        """Let `call` fail with a CUDA error once, after `skip` calls that succeed."""
        self._library.stand_in_inject(call.encode(), error, skip)

    def clear_faults(self) -> None:
        self._library.stand_in_clear_faults()

    def seed(self, seed: int) -> None:
        self._library.stand_in_seed(ctypes.c_ulonglong(seed))

    def limit_memory(self, num_bytes: int) -> None:
        """Bytes of each device."""
        self._library.stand_in_limit_memory(num_bytes)

    def poison_up_to(self, num_bytes: int) -> None:
        """Larger blocks stay untouched, so that they take no memory of this machine."""
        self._library.stand_in_poison_up_to(num_bytes)

    def other_process(self, num_bytes: int, device: int = 0) -> None:
        """Let another process take memory, or with a negative number give it back."""
        self._library.stand_in_other_process(device, num_bytes)

    def calls(self, call: str) -> int:
        """How often an entry point was called."""
        return int(self._library.stand_in_calls(call.encode()))

    def used(self, device: int = 0) -> int:
        """Bytes that are allocated on a device."""
        return int(self._library.stand_in_used(device))


OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation"""
LAUNCH_FAILURE = 719
"""cudaErrorLaunchFailure"""
EXECUTABLE_NODE = 64 << 10
"""What the driver of the stand-in takes for a node of an executable graph."""
