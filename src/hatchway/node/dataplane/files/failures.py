"""The errors of file work in a guest as those that a client is told."""

import errno

from hatchway.domain.errors import (
    Conflict,
    Exhausted,
    Forbidden,
    HatchwayError,
    HostExhausted,
    InvalidRequest,
    NotFound,
    Unavailable,
    Unprocessable,
)
from hatchway.node.dataplane.files.answers import Failure
from hatchway.node.guest.seam import GuestError, LinkLost

_MESSAGE = 1024
_COUNTERS = ("bytes", "files", "dirs", "links", "removed", "changed")


def failed(failure: Failure) -> HatchwayError:
    """The error that a `files` program said."""
    error = _of_errno(failure.errno, _readable(failure.message or failure.code))
    error.extra |= {name: value for name in _COUNTERS if isinstance(value := getattr(failure, name), int)}
    return error


def refused(error: GuestError) -> HatchwayError:
    """The agent did not start the program."""
    if error.errno == errno.EAGAIN:
        return too_many(str(error))
    if is_unknown_user(error):
        return Unprocessable("unknown_user", _readable(str(error)), "Use a user that the sandbox has.")
    return Unprocessable("file_operation_failed", _readable(str(error)), "Look at the cause.")


def is_unknown_user(error: GuestError) -> bool:
    """Whether the agent knows no such user."""
    return error.errno == errno.ENOEXEC and str(error).startswith("no such user")


def too_many(cause: str) -> HatchwayError:
    """A bound of operations was reached."""
    return Exhausted("too_many_file_operations", _readable(cause), "Try again when others have ended.")


def unreachable(error: LinkLost) -> HatchwayError:
    """The sandbox ended, or does not answer."""
    return Unavailable(
        "sandbox_unreachable",
        f"The sandbox does not answer: {error}",
        "Look at its state; start it again if it stopped.",
    )


def _of_errno(number: int, cause: str) -> HatchwayError:
    match number:
        case errno.ESRCH:
            return Unprocessable("unknown_user", cause, "Use a user that the sandbox has.")
        case errno.ENOENT:
            return NotFound("file_not_found", cause, "Look at the path; a missing folder is made with parents=1.")
        case errno.EACCES | errno.EPERM:
            return Forbidden("file_permission_denied", cause, "Use another `user`, or change mode or owner.")
        case errno.EEXIST:
            return Conflict("file_exists", cause, "Use another name, or overwrite what is there.")
        case errno.ENOTDIR:
            return Conflict("not_a_folder", cause, "Look at the path: something in it is not a folder.")
        case errno.EISDIR:
            return Conflict("is_a_folder", cause, "Use `list` or `archive` for folders.")
        case errno.ENOTEMPTY:
            return Conflict("folder_not_empty", cause, "Use `recursive`, or empty it first.")
        case errno.ELOOP:
            return Conflict("link_loop", cause, "Look at the symbolic links in the path.")
        case errno.EXDEV:
            return Conflict("across_file_systems", cause, "Copy it as an archive, then remove it.")
        case errno.EBUSY | errno.ETXTBSY:
            return Conflict("file_busy", cause, "Something in the sandbox uses it; a mounted file cannot be replaced.")
        case errno.EROFS:
            return Conflict("file_system_read_only", cause, "Use another folder.")
        case errno.ESTALE:
            return Conflict("file_changed", cause, "It became shorter while it was read: read it again.")
        case errno.ENOSPC | errno.EDQUOT:
            return HostExhausted(
                "sandbox_disk_full", cause, "Remove something in the sandbox, or use one with a larger disk."
            )
        case errno.ENAMETOOLONG:
            return Unprocessable("path_too_long", cause, "A name has at most 255 octets, a path 4,095.")
        case errno.EFBIG:
            return Unprocessable("file_too_large", cause, "The sandbox's file system cannot hold a file of this size.")
        case errno.EMSGSIZE:
            return InvalidRequest("upload_size_mismatch", cause, "Nothing was replaced; send the whole file again.")
        case errno.EBADMSG:
            return Unprocessable("archive_malformed", cause, "Send a whole tar archive whose names are relative.")
        case errno.EOPNOTSUPP:
            return Unprocessable(
                "archive_unsupported", cause, "Make the archive without sparse or multi-volume members."
            )
        case errno.EREMOTE:
            return Unprocessable(
                "file_system_remote", cause, "Watch it without `local`, and look now and then yourself."
            )
        case errno.EMFILE | errno.ENFILE:
            return Exhausted("too_many_watches", cause, "Watch fewer folders, or end another watch.")
        case errno.EINVAL:
            return Unprocessable("file_operation_invalid", cause, "Only regular files can be read and replaced.")
    return Unprocessable("file_operation_failed", cause, "Look at the cause.")


def _readable(text: str) -> str:
    return "".join(character if character.isprintable() else "�" for character in text[:_MESSAGE])
