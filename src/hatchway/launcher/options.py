"""The launcher's command line, parsed by hand: the usual parser would be a tenth of this process."""

import msgspec

from hatchway.launcher.errors import Unfit

USAGE = """usage: python -I -m hatchway.launcher --run-dir DIR --shim FILE [options]
  --run-dir DIR      folder of the sockets and records (DIR/vm/ID/, DIR/launcher.sock)
  --shim FILE        the hatchway-shim program
  --peer-uid N       user that may ask; repeated; the first owns the VMs' sockets (default: the launcher's own)
  --uid-base N       VM in slot K runs as user N + K (default 1900000000)
  --slots N          most VMs at once (default 1024)
  --stock N          slots prepared ahead (default 8)
  --memory-mib N     most memory of all VMs together, in MiB (default: what the host has)
  --listen-fd N      listening SOCK_SEQPACKET socket (default: binds DIR/launcher.sock)"""

MAX_UID = 2**32 - 2


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    run_dir: str
    shim: str
    peer_uids: tuple[int, ...] = ()
    uid_base: int = 1_900_000_000
    slots: int = 1024
    stock: int = 8
    memory_mib: int = 0
    """Bound of all VMs' memory together; 0: none but the host's own."""
    listen_fd: int | None = None
    outer_uid: int | None = None
    """In a user namespace: the uid outside that is 0 inside. Set by the launcher itself."""


_NUMBERS = {
    "--uid-base": ("uid_base", 1, MAX_UID),
    "--slots": ("slots", 1, 65_536),
    "--stock": ("stock", 0, 64),
    "--memory-mib": ("memory_mib", 0, 2**40),
    "--listen-fd": ("listen_fd", 3, 65_535),
    "--in-user-namespace": ("outer_uid", 0, MAX_UID),
}


def parse(words: list[str]) -> Options:
    """Parses the arguments after the module name. Raises `Unfit` with the usage."""
    found: dict[str, object] = {}
    peers: list[int] = []
    rest = iter(words)
    for word in rest:
        value = next(rest, None)
        if value is None:
            raise Unfit(f"{word}: value missing\n{USAGE}")
        if word in ("--run-dir", "--shim"):
            found[word[2:].replace("-", "_")] = value
        elif word == "--peer-uid":
            peers.append(_number(word, value, 0, MAX_UID))
        elif word in _NUMBERS:
            name, lowest, highest = _NUMBERS[word]
            found[name] = _number(word, value, lowest, highest)
        else:
            raise Unfit(f"{word}: no such option\n{USAGE}")
    if "run_dir" not in found or "shim" not in found:
        raise Unfit(f"--run-dir and --shim are needed\n{USAGE}")
    options = msgspec.convert({**found, "peer_uids": tuple(peers)}, Options)
    if options.uid_base + options.slots > MAX_UID:
        raise Unfit("--uid-base plus --slots goes beyond the highest uid")
    return options


def _number(word: str, text: str, lowest: int, highest: int) -> int:
    if not text.isascii() or not text.isdecimal() or not lowest <= int(text) <= highest:
        raise Unfit(f"{word} {text}: a number from {lowest} to {highest} is needed")
    return int(text)
