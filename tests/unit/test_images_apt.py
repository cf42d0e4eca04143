"""Which of the host's package sources count."""

from pathlib import Path

import pytest

from hatchway.domain.errors import Unavailable
from hatchway.node.images.apt import Distribution, Source, host_sources, parse_deb822, parse_one_line, read_distribution

DEBIAN = Distribution("debian", "bookworm", "Debian 12")


def test_one_line_sources() -> None:
    text = """
# deb http://old.example/debian bookworm main
deb [arch=amd64,arm64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib # near
deb-src http://mirror.example/debian bookworm main
deb http://flat.example/ ./
"""
    assert parse_one_line(text) == [
        Source(
            "http://mirror.example/debian",
            "bookworm",
            ("main", "contrib"),
            {"Architectures": "amd64 arm64", "Signed-By": "/k.gpg"},
        ),
        Source("http://flat.example/", "./", (), {}),
    ]


def test_deb822_sources() -> None:
    text = """# comment
Types: deb deb-src
URIs: http://a.example/debian http://b.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Types: deb
Enabled: no
URIs: http://off.example/
Suites: bookworm
Components: main
"""
    found = parse_deb822(text)
    assert [(source.uri, source.suite) for source in found] == [
        (f"http://{host}.example/debian", suite) for host in "ab" for suite in ("bookworm", "bookworm-updates")
    ]
    assert found[0].options == {"Signed-By": "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc"}
    assert parse_deb822(found[0].stanza()) == [found[0]], "what is written reads the same"


def test_only_the_distributions_suites_count(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text(
        "deb http://m.example/debian bookworm main\ndeb http://m.example/debian/ bookworm contrib main\n"
    )
    (parts / "own.sources").write_text(
        "Types: deb\nURIs: https://s.example/security\nSuites: bookworm-security\nComponents: main\nSigned-By: /own.gpg\n"
    )
    (parts / "other.list").write_text("deb https://else.example nodistro main\ndeb cdrom:[x]/ bookworm main\n")
    (parts / "ignored.txt").write_text("deb http://x.example bookworm main\n")
    found = host_sources(DEBIAN, tmp_path)
    assert [(source.uri, source.suite, source.components) for source in found] == [
        ("http://m.example/debian/", "bookworm", ("main", "contrib")),
        ("https://s.example/security", "bookworm-security", ("main",)),
    ]
    assert found[1].options["Signed-By"] == "/own.gpg"


def test_a_host_without_sources_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://m.example/debian trixie main\n")
    with pytest.raises(Unavailable, match="no_package_sources"):
        host_sources(DEBIAN, tmp_path)


def test_which_hosts_are_supported(tmp_path: Path) -> None:
    path = tmp_path / "os-release"
    path.write_text('PRETTY_NAME="Ubuntu 24.04 LTS"\nID=ubuntu\nVERSION_CODENAME=noble\n')
    assert read_distribution(path) == Distribution("ubuntu", "noble", "Ubuntu 24.04 LTS")
    path.write_text('PRETTY_NAME="Fedora"\nID=fedora\n')
    with pytest.raises(Unavailable, match="Fedora"):
        read_distribution(path)
    with pytest.raises(Unavailable, match="unsupported_host"):
        read_distribution(tmp_path / "none")
