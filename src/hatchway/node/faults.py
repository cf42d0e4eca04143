"""Turns what can go wrong below into errors that a user understands."""

import errno

from hatchway.domain.errors import Exhausted, HatchwayError, HostExhausted, Internal, Unavailable
from hatchway.node.guest.seam import GuestError, LinkLost
from hatchway.node.vmm.seam import (
    LauncherUnavailable,
    LaunchRefused,
    SnapshotMismatch,
    VmmDied,
    VmmError,
    VmmMissing,
    VmmTimeout,
)

_DISK_REMEDY = "Free space on the file system of the data folder, or delete sandboxes, then try again."


def explained(error: BaseException) -> HatchwayError:
    """Returns the error of the API that stands for `error`; an unknown one becomes `Internal` with its own words."""
    match error:
        case HatchwayError():
            return error
        case VmmMissing():
            return Unavailable(
                "vmm_missing", str(error), "Install the package that the cause names; `hatchway doctor` checks it."
            )
        case LauncherUnavailable():
            return Unavailable("launcher_unavailable", str(error), "It is being restarted; try again.")
        case LaunchRefused(code="host_exhausted"):
            return HostExhausted("host_exhausted", str(error), "Delete or stop other sandboxes, then try again.")
        case LaunchRefused(code="no_slot"):
            return Exhausted("no_slot", str(error), "Delete or stop other sandboxes, then try again.")
        case SnapshotMismatch():
            return Internal("snapshot_mismatch", str(error), "Try again: the snapshot is made anew.")
        case VmmDied():
            return Internal("vmm_died", str(error), "Try again; the node's log has the machine's console.")
        case VmmTimeout() | TimeoutError():
            return Unavailable(
                "timeout",
                str(error) or "The virtual machine did not answer in time.",
                "Try again when the host is less busy.",
            )
        case LinkLost():
            return Internal(
                "agent_lost",
                str(error) or "The guest agent does not answer.",
                "Delete the sandbox, or stop and start it.",
            )
        case GuestError():
            return Internal("guest_refused", str(error), "Delete the sandbox, or stop and start it.")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return HostExhausted("host_disk_full", "The host's disk is full.", _DISK_REMEDY)
        case OSError(errno=errno.ENOMEM):
            return HostExhausted(
                "host_memory_full", "The host has no memory left.", "Delete or stop other sandboxes, then try again."
            )
        case VmmError() | OSError():
            return Internal("vmm_error", str(error), "The node's log says more.")
        case _:
            return Internal("internal", f"{type(error).__name__}: {error}", "The node's log says more.")
