"""What is wrong with an archive, as errors that a user understands."""

from hatchway.domain.errors import HatchwayError, Unprocessable


def invalid(why: str) -> HatchwayError:
    """It is no archive, or a part of one."""
    return Unprocessable(
        "archive_invalid", f"This is not a whole archive: {why}.", "Fetch it again; export anew where it was cut off."
    )


def altered(what: str) -> HatchwayError:
    """It is not what was signed."""
    return Unprocessable(
        "archive_altered", f"The archive is not what was exported: {what}.", "Fetch it again from where it was made."
    )


def untrusted(key_id: str) -> HatchwayError:
    """Signed, by somebody who is not trusted here."""
    return Unprocessable(
        "archive_untrusted",
        f"The archive is signed with the key {key_id}, which is not trusted here.",
        "Where you know whose it is, add the key to `trusted_keys` in [archives] of hatchway.toml.",
        key_id=key_id,
    )


def too_new(found: int, known: int) -> HatchwayError:
    """Of a later version."""
    return Unprocessable(
        "archive_too_new",
        f"The archive has format {found}; this version reads up to {known}.",
        "Import it with a later version of Hatchway.",
    )
