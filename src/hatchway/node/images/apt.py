"""The host's package sources, as far as they belong to its own distribution, and what the build gets from them.

Lists and downloads are kept in a folder of the build: the host's own package state is neither trusted to be fresh nor changed.
Mirrors, keys, proxies and credentials are those that the host is configured with.
"""

import email.utils
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hatchway.domain.errors import Unavailable
from hatchway.node.images import host

_UPDATE_S = 600.0
_DOWNLOAD_S = 1800.0
_QUERY_S = 60.0

_KEYRINGS = {
    "debian": ("debian-archive-keyring.pgp", "debian-archive-keyring.gpg"),
    "ubuntu": ("ubuntu-archive-keyring.pgp", "ubuntu-archive-keyring.gpg"),
}


@dataclass(frozen=True)
class Distribution:
    """The host's distribution: `id` is `debian` or `ubuntu`, `codename` for example `bookworm`."""

    id: str
    codename: str
    name: str


@dataclass(frozen=True)
class Source:
    """One archive and suite that packages come from; `options` are further deb822 fields, such as `Signed-By`."""

    uri: str
    suite: str
    components: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)

    def stanza(self) -> str:
        """Returns it in deb822 form."""
        lines = ["Types: deb", f"URIs: {self.uri}", f"Suites: {self.suite}", f"Components: {' '.join(self.components)}"]
        lines += [f"{key}: {value}" for key, value in sorted(self.options.items())]
        return "\n".join(lines) + "\n"


def read_distribution(path: Path = Path("/etc/os-release")) -> Distribution:
    """Reads which distribution the host is. Raises `Unavailable("unsupported_host")` for others than Debian and Ubuntu."""
    values: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            key, separator, value = line.partition("=")
            if separator:
                values[key.strip()] = "".join(shlex.split(value))
    identity, codename = values.get("ID", ""), values.get("VERSION_CODENAME", "")
    if identity not in _KEYRINGS or not codename:
        raise Unavailable(
            "unsupported_host",
            f"Templates are built on Debian and Ubuntu hosts; this one says {values.get('PRETTY_NAME', 'nothing of itself')!r}.",
            "Build on such a host and copy its images folder here.",
        )
    return Distribution(identity, codename, values.get("PRETTY_NAME", identity))


def parse_one_line(text: str) -> list[Source]:
    """Parses `sources.list` syntax; `deb-src` and comments are skipped."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)((?:\s+\S+)*)", line.split("#", 1)[0].strip())
        if match is None:
            continue
        options = {}
        for option in (match[1] or "").split():
            key, _, value = option.partition("=")
            options[_ONE_LINE.get(key, key)] = value.replace(",", " ")
        found.append(Source(match[2], match[3], tuple(match[4].split()), options))
    return found


_ONE_LINE = {
    "signed-by": "Signed-By",
    "trusted": "Trusted",
    "arch": "Architectures",
    "check-valid-until": "Check-Valid-Until",
}


def parse_deb822(text: str) -> list[Source]:
    """Parses `*.sources` syntax, one `Source` per URI and suite; disabled stanzas and source packages are skipped."""
    found = []
    for stanza in re.split(r"\n[ \t]*\n", "\n".join(line for line in text.splitlines() if not line.startswith("#"))):
        fields: dict[str, str] = {}
        last = ""
        for line in stanza.splitlines():
            if line[:1] in (" ", "\t") and last:
                fields[last] += "\n" + line
            elif ":" in line:
                key, _, value = line.partition(":")
                last = key.strip().title()
                fields[last] = value.strip()
        if "deb" not in fields.pop("Types", "").split() or fields.pop("Enabled", "yes").lower() in ("no", "false", "0"):
            continue
        uris, suites = fields.pop("Uris", "").split(), fields.pop("Suites", "").split()
        components = tuple(fields.pop("Components", "").split())
        found += [Source(uri, suite, components, dict(fields)) for uri in uris for suite in suites]
    return found


def host_sources(distribution: Distribution, etc: Path = Path("/etc/apt")) -> tuple[Source, ...]:
    """Returns the host's sources of its distribution's own suites (release, updates, security), keys made explicit.

    Whether an archive really is the distribution's is checked after its index was read, see `Apt.refresh`. Raises
    `Unavailable("no_package_sources")`.
    """
    found: list[Source] = []
    main = etc / "sources.list"
    parts = etc / "sources.list.d"
    if main.is_file():
        found += parse_one_line(main.read_text(encoding="utf-8"))
    for path in sorted(parts.iterdir()) if parts.is_dir() else ():
        if path.suffix == ".list":
            found += parse_one_line(path.read_text(encoding="utf-8"))
        elif path.suffix == ".sources":
            found += parse_deb822(path.read_text(encoding="utf-8"))
    name = distribution.codename
    suites = {name, f"{name}-updates", f"{name}-security"}
    keyring = next((path for file in _KEYRINGS[distribution.id] if (path := _SHARE / file).is_file()), None)
    wanted: dict[tuple[str, str], Source] = {}
    for source in found:
        if source.suite not in suites or not source.uri.startswith(("http://", "https://", "mirror+", "file:")):
            continue
        options = dict(source.options)
        if keyring is not None and "Trusted" not in options:
            options.setdefault("Signed-By", str(keyring))
        options.pop("Architectures", None)
        key = (source.uri.rstrip("/"), source.suite)
        known = wanted[key].components if key in wanted else ()
        components = known + tuple(part for part in source.components if part not in known)
        wanted[key] = Source(source.uri, source.suite, components, options)
    if not any(source.suite == name for source in wanted.values()):
        raise Unavailable(
            "no_package_sources",
            f"The host's package sources name no archive of {distribution.name} (suite {name}).",
            "Add the distribution's archive to /etc/apt/sources.list.d, then try again.",
        )
    return tuple(wanted.values())


_SHARE = Path("/usr/share/keyrings")


class Apt:
    """The package tools on lists and caches in a folder of their own."""

    def __init__(self, folder: Path, distribution: Distribution) -> None:
        self.distribution = distribution
        self.sources_file = folder / "sources.list.d" / "distribution.sources"
        self._folder = folder
        self._conf = folder / "apt.conf"

    def refresh(self, on_line: Callable[[str], None]) -> None:
        """Reads the indexes of the host's sources. Raises `Unavailable`."""
        for name in ("lists/partial", "cache/archives/partial", "sources.list.d", "debs"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        empty = self._folder / "empty"
        empty.write_text("")
        self._conf.write_text(
            # Hooks of the host are for the host's own lists.
            "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n"
            f'Dir::State::lists "{self._folder}/lists";\nDir::Cache "{self._folder}/cache";\n'
            f'Dir::Etc::sourcelist "{empty}";\nDir::Etc::sourceparts "{self.sources_file.parent}";\n'
            'Acquire::Languages "none";\nAcquire::Retries "3";\n',
            encoding="utf-8",
        )
        sources = host_sources(self.distribution)
        self._write(sources)
        self._run("apt-get", "update", within_s=_UPDATE_S, on_line=on_line)
        listing = self._run(
            "apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(ORIGIN)", "Created-By: Packages"
        )
        own = {
            (words[0].rstrip("/"), words[1])
            for words in (line.split() for line in listing.splitlines())
            if len(words) >= 3 and words[2].lower() == self.distribution.id
        }
        kept = tuple(source for source in sources if (source.uri.rstrip("/"), source.suite) in own)
        if not any(source.suite == self.distribution.codename for source in kept):
            raise Unavailable(
                "no_package_sources",
                f"No configured archive says that it is {self.distribution.name}'s.",
                "Add the distribution's archive to /etc/apt/sources.list.d, then try again.",
            )
        self._write(kept)

    def show(self, package: str) -> dict[str, str] | None:
        """Returns the fields of the package version that would be installed; None when there is none."""
        try:
            text = self._run("apt-cache", "show", "--no-all-versions", package)
        except Unavailable:
            return None
        fields: dict[str, str] = {}
        for line in text.splitlines():
            key, separator, value = line.partition(":")
            if separator and not line.startswith((" ", "\t")):
                fields.setdefault(key, value.strip())
        return fields if "Version" in fields else None

    def download(self, package: str, on_line: Callable[[str], None]) -> Path:
        """Downloads a package, checked against its signed index; returns the file. Raises `Unavailable`."""
        folder = self._folder / "debs"
        before = set(folder.iterdir())
        self._run("apt-get", "download", package, within_s=_DOWNLOAD_S, on_line=on_line, cwd=folder)
        new = set(folder.iterdir()) - before
        fitting = [path for path in new or folder.iterdir() if path.name.startswith(f"{package}_")]
        if not fitting:
            raise Unavailable("tool_failed", f"apt-get download {package} left no file.", "Try again.")
        return max(fitting, key=lambda path: path.stat().st_mtime)

    def release_time(self) -> int:
        """Returns when the newest of the indexes was made, in Unix seconds. Raises `Unavailable`."""
        times = []
        for path in (self._folder / "lists").glob("*Release"):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[:40]:
                if line.startswith("Date: "):
                    times.append(int(email.utils.parsedate_to_datetime(line[6:]).timestamp()))
        if not times:
            raise Unavailable("tool_failed", "apt-get update left no index.", "Try again.")
        return max(times)

    def transport_options(self) -> str:
        """Returns how the host reaches its mirrors (proxies, certificates), in the form of an apt.conf file."""
        dump = self._run("apt-config", "dump", "Acquire")
        wanted = re.compile(r"Acquire::(https?|ftp|tor|Retries|ForceIPv[46])\b.* \"[^\"]+\";")
        return "".join(line + "\n" for line in dump.splitlines() if wanted.fullmatch(line))

    def _write(self, sources: tuple[Source, ...]) -> None:
        self.sources_file.write_text("\n".join(source.stanza() for source in sources), encoding="utf-8")

    def _run(
        self,
        *argv: str,
        within_s: float = _QUERY_S,
        on_line: Callable[[str], None] | None = None,
        cwd: Path | None = None,
    ) -> str:
        command = [argv[0], "-c", str(self._conf), *argv[1:]]
        return host.run(command, within_s=within_s, on_line=on_line, cwd=cwd, keep_output=True)
