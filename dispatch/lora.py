"""LoRA cases: for how many active adapters graphs are captured."""

from __future__ import annotations

from ..errors import InvalidSetting


def lora_cases(
    max_loras: int, *, specialise: bool = True, specialise_counts: bool = False
) -> tuple[int, ...]:
    """The adapter counts to capture for, ascending; (0,) without LoRA.

    `max_loras + 1` has room for every batch: all adapters and the base model. `specialise` adds
    case 0, a graph without adapter kernels; `specialise_counts` adds the powers of two up to
    `max_loras`. A batch takes the smallest case that has room for it, so leaving a case out costs
    time, never a graph. Raises InvalidSetting for a negative `max_loras`.
    """
    if max_loras < 0:
        raise InvalidSetting(
            name="max_loras", value=max_loras, reason="it is negative", expected="0 or more"
        )
    if max_loras == 0:
        return (0,)
    none = (0,) if specialise else ()
    powers = tuple(1 << bit for bit in range(max_loras.bit_length())) if specialise_counts else ()
    return (*none, *powers, max_loras + 1)
