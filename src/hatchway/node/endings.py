"""What the end of a machine makes of its sandbox."""

from hatchway.domain.lifecycle import Cause, State
from hatchway.node.vmm.seam import ExitStatus

OUT_OF_MEMORY = (
    "The host's kernel ended the virtual machine for lack of memory: it needed more than its memory_mib and the monitor's "
    "share, or all sandboxes together more than the host gives them."
)


def ended_by(status: ExitStatus | None, why: str = "") -> tuple[State, Cause, str]:
    """Returns the state of a sandbox whose VM ended unasked, the cause, and the reason for people; `why` where we ended it ourselves."""
    if why:
        return State.FAILED, Cause.VMM_DIED, why
    if status is None:
        return State.FAILED, Cause.VMM_DIED, "The virtual machine is gone."
    if status.out_of_memory:
        return State.FAILED, Cause.OUT_OF_MEMORY, OUT_OF_MEMORY
    if status.guest_shutdown:
        return State.STOPPED, Cause.GUEST_POWER_OFF, "The guest powered itself off."
    if status.guest_reset:
        return State.STOPPED, Cause.GUEST_RESET, "The guest was reset: it rebooted itself, or its kernel panicked."
    if status.signal is not None:
        return State.FAILED, Cause.VMM_DIED, f"The virtual machine was killed by signal {status.signal}."
    if status.code is not None:
        return State.FAILED, Cause.VMM_DIED, f"The virtual machine ended by itself with exit code {status.code}."
    return State.FAILED, Cause.VMM_DIED, "The virtual machine is gone."
