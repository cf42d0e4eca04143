"""Which domains anybody can register a name under: the public suffix list, as the installed package bundles it."""

import functools

from publicsuffixlist import PublicSuffixList


@functools.cache
def _registries() -> PublicSuffixList:
    return PublicSuffixList(only_icann=True)


@functools.cache
def _services() -> PublicSuffixList:
    return PublicSuffixList()


def is_public_suffix(name: str) -> bool:
    """Whether a registry gives out the names directly below a canonical name; so is every top-level domain that is not known."""
    return bool(_registries().is_public(name))


def is_shared_suffix(name: str) -> bool:
    """Whether a service gives the names directly below it to its customers (the private section of the list)."""
    return not is_public_suffix(name) and bool(_services().is_public(name))


def shared_suffix_of(name: str) -> str | None:
    """The service's domain that a name is one customer's of, or that it is itself."""
    suffix = _services().publicsuffix(name)
    return suffix if suffix is not None and is_shared_suffix(suffix) else None
