"""Which address stands for which name inside a sandbox.

An address follows from the name alone, in every sandbox and after every restart: a program that remembers it through a fork, a restore
or the death of this process still means the same name. No address is ever given to a second name while the gateway lives; where two
names fall on one address, the later gets the next free one. The table is bounded: a full one is an error, not a rebinding.
"""

import hashlib
import ipaddress
from collections.abc import Iterable

from hatchway.wire.egress import SYNTHETIC_RANGE

MAX_NAMES = 4096

_NETWORK = ipaddress.IPv4Network(SYNTHETIC_RANGE)
_FIRST = int(_NETWORK.network_address) + 1
_SIZE = _NETWORK.num_addresses - 2


class NamesExhausted(Exception):
    """The sandbox has asked for as many names as it may in its life."""


def is_synthetic(address: str) -> bool:
    """Whether an address is of the range that names get theirs from."""
    return ipaddress.IPv4Address(address) in _NETWORK


class SyntheticNames:
    """The table of one sandbox."""

    def __init__(self, bound: int = MAX_NAMES) -> None:
        self._bound = bound
        self._addresses: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def change(self, bound: int) -> None:
        """Goes on with another bound; what has an address keeps it."""
        self._bound = bound

    def bind(self, name: str) -> ipaddress.IPv4Address:
        """Returns the address of a canonical name, the same for good. Raises `NamesExhausted`."""
        address = self._addresses.get(name)
        if address is None:
            if len(self._addresses) >= self._bound:
                raise NamesExhausted(f"{self._bound} names have addresses")
            address = _home(name)
            while address in self._names:
                address = _FIRST + (address - _FIRST + 1) % _SIZE
            self._addresses[name] = address
            self._names[address] = name
        return ipaddress.IPv4Address(address)

    def bind_all(self, names: Iterable[str]) -> None:
        """Gives addresses to names before anybody asks, as many as there is room for; half of the table stays for later ones."""
        for name in sorted(names):
            if len(self._addresses) >= self._bound // 2:
                return
            self.bind(name)

    def address_of(self, name: str) -> ipaddress.IPv4Address | None:
        """Returns the address of a name that has one."""
        address = self._addresses.get(name)
        return None if address is None else ipaddress.IPv4Address(address)

    def name_of(self, address: str) -> str | None:
        """Returns the name that an address stands for; None: it stands for nothing."""
        return self._names.get(int(ipaddress.IPv4Address(address)))

    def is_home(self, name: str, address: str) -> bool:
        """Whether `name`, were it asked for now, would get just this address: then who connects there has asked before a restart of ours."""
        at = int(ipaddress.IPv4Address(address))
        return at not in self._names and name not in self._addresses and _home(name) == at


def _home(name: str) -> int:
    digest = hashlib.blake2b(name.encode("ascii"), digest_size=8).digest()
    return _FIRST + int.from_bytes(digest, "big") % _SIZE
