"""The policy of package installers: from the configuration of this machine's own tools, as these read it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hatchway.cli.installers import profile_of
from hatchway.cli.installers.machine import Machine
from hatchway.cli.installers.profile import Profile
from hatchway.domain.policy.assembly import TieredDocument
from hatchway.domain.policy.compiled import compile_policy
from hatchway.domain.policy.reading import load
from hatchway.domain.policy.verdicts import Action, Request

Make = Callable[..., Profile]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a machine with these files (of the root, the home `~`, the project `.`), environment and programs, and its profile."""

    def machine(
        files: dict[str, str] | None = None,
        programs: dict[str, str] | None = None,
        addresses: Any = None,
        **environment: str,
    ) -> Profile:
        for name, text in (files or {}).items():
            path = tmp_path / name.replace("~", "home").replace("./", "project/").lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name, script in (programs or {}).items():
            program = tmp_path / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
        for folder in ("home", "project"):
            (tmp_path / folder).mkdir(exist_ok=True)
        environment = {"HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "bin"), **environment}
        found = profile_of(
            Machine(
                environment=environment,
                root=tmp_path,
                project=tmp_path / "project",
                addresses=addresses or (lambda host: []),
            )
        )
        load(found.as_text(), 1_900_000_000.0)
        return found

    return machine


def rules(profile: Profile) -> dict[str, dict[str, Any]]:
    return {rule["id"]: rule for rule in profile.document.get("rules", [])}


def passes(profile: Profile, url: str, method: str = "GET") -> bool:
    policy = compile_policy([TieredDocument(tier="project", name="p", document=load(profile.as_text()))])
    scheme, _, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    host, _, port = authority.partition(":")
    tls = scheme == "https"
    request = Request(host=host, port=int(port or (443 if tls else 80)), tls=tls, method=method, path=slash + path)
    return policy.request(request, 0.0).action is Action.ALLOW


def test_nothing_is_configured_and_nothing_is_allowed(make: Make) -> None:
    profile = make()
    assert "rules" not in profile.document
    assert any("pip" in note for note in profile.notes)
    assert any("npm" in note for note in profile.notes)


@pytest.mark.parametrize(
    ("files", "environment"),
    [
        ({}, {"PIP_INDEX_URL": "https://index.example/simple/"}),
        ({"/etc/pip.conf": "[global]\nindex-url = https://index.example/simple"}, {}),
        ({"~/.config/pip/pip.conf": "[global]\nindex-url = https://index.example/simple"}, {}),
        ({"~/.pip/pip.conf": "[install]\nindex-url=https://index.example/simple"}, {}),
        ({"/etc/pip.conf": "[global]\nindex-url = https://other.example/simple"}, {"PIP_INDEX_URL": "https://index.example/simple"}),
        ({"~/.config/uv/uv.toml": '[[index]]\nurl = "https://index.example/simple"\ndefault = true'}, {}),
        ({"./pyproject.toml": '[tool.uv]\nindex-url = "https://index.example/simple"'}, {}),
        ({}, {"UV_DEFAULT_INDEX": "team=https://index.example/simple"}),
    ],
)  # fmt: skip
def test_a01_the_index_of_pip_and_uv_is_read_and_not_written(
    make: Make, files: dict[str, str], environment: dict[str, str]
) -> None:
    profile = make(files, **environment)
    assert {rule["to"]["hosts"][0] for rule in rules(profile).values()} == {"index.example"}
    assert passes(profile, "https://index.example/simple/requests/")
    assert passes(profile, "https://index.example/packages/aa/requests-2.0%2Blocal.whl")
    assert not passes(profile, "https://index.example/simple/requests/", "POST")
    assert not passes(profile, "https://index.example/legacy/")
    assert not passes(profile, "https://upload.index.example/simple/")


def test_an_index_below_a_path_has_its_files_beside_it(make: Make) -> None:
    profile = make(
        PIP_INDEX_URL="https://repo.example:8443/api/pypi/team/simple",
        PIP_EXTRA_INDEX_URL="https://extra.example/a/simple/ https://third.example/simple/",
    )
    assert passes(profile, "https://repo.example:8443/api/pypi/team/packages/x.whl")
    assert not passes(profile, "https://repo.example:8443/api/pypi/other/simple/x/")
    assert not passes(profile, "https://repo.example/api/pypi/team/simple/x/")
    assert passes(profile, "https://extra.example/a/simple/x/")
    assert passes(profile, "https://third.example/simple/x/")


def test_a_pip_that_is_not_configured_says_its_default(make: Make) -> None:
    profile = make(programs={"python3": 'echo "https://index.example/simple files.example"'})
    assert passes(profile, "https://index.example/simple/x/")
    assert passes(profile, "https://files.example/packages/x.whl")
    assert not passes(profile, "https://index.example/packages/x.whl")
    both = make(
        programs={"python3": 'echo "https://index.example/simple files.example"'},
        PIP_EXTRA_INDEX_URL="https://extra.example/simple",
    )
    assert {rule["to"]["hosts"][0] for rule in rules(both).values()} == {
        "extra.example",
        "index.example",
        "files.example",
    }


@pytest.mark.parametrize(
    ("files", "programs", "environment"),
    [
        ({"~/.npmrc": "registry=https://npm.example/api/npm/\n@team:registry=https://npm.example/team/"}, {}, {}),
        ({"./.npmrc": "registry = ${WHERE}\n@team:registry=https://npm.example/team/"}, {}, {"WHERE": "https://npm.example/api/npm/"}),
        ({"/etc/npmrc": "@team:registry=https://npm.example/team/"}, {}, {"NPM_CONFIG_REGISTRY": "https://npm.example/api/npm/"}),
        ({"~/.npmrc": "@team:registry=https://npm.example/team/"}, {"npm": 'test "$3" = registry && echo https://npm.example/api/npm/'}, {}),
    ],
)  # fmt: skip
def test_the_registries_of_npm(
    make: Make, files: dict[str, str], programs: dict[str, str], environment: dict[str, str]
) -> None:
    profile = make(files, programs, **environment)
    assert passes(profile, "https://npm.example/api/npm/@scope%2Fname")
    assert passes(profile, "https://npm.example/api/npm/left-pad/-/left-pad-1.tgz")
    assert passes(profile, "https://npm.example/team/x")
    assert not passes(profile, "https://npm.example/api/npm/x", "PUT")
    assert not passes(profile, "https://npm.example/other/x")


def test_the_sources_of_apt_in_both_formats(make: Make) -> None:
    profile = make(
        {
            "/etc/apt/sources.list": "deb [arch=amd64 signed-by=/x y] http://deb.example/debian stable main\n# deb http://no.example/ x y\ndeb-src https://src.example/debian/ stable main",
            "/etc/apt/sources.list.d/flat.list": "deb https://flat.example/repo ./",
            "/etc/apt/sources.list.d/new.sources": "Types: deb\nURIs: https://new.example/ubuntu\n https://second.example/ubuntu\nSuites: noble\n\nEnabled: no\nURIs: https://off.example/x\nSuites: x\n",
            "/etc/apt/sources.list.d/odd.list": "deb mirror+file:/etc/apt/mirrors stable main\ndeb cdrom:[x]/ stable main",
        }
    )
    assert passes(profile, "http://deb.example/debian/dists/stable/InRelease")
    assert passes(profile, "http://deb.example/debian/pool/main/x.deb")
    assert not passes(profile, "https://deb.example/debian/dists/stable/InRelease")
    assert not passes(profile, "http://deb.example/other/dists/x")
    for url in (
        "https://src.example/debian/dists/x",
        "https://flat.example/repo/x.deb",
        "https://new.example/ubuntu/pool/x",
        "https://second.example/ubuntu/dists/x",
    ):
        assert passes(profile, url), url
    hosts = {rule["to"]["hosts"][0] for rule in rules(profile).values()}
    assert not hosts & {"no.example", "off.example"}
    assert any("mirror+file" in note for note in profile.notes)


def test_the_registries_of_cargo(make: Make) -> None:
    profile = make(
        {
            "~/.cargo/config.toml": '[source.crates-io]\nreplace-with = "team"\n[source.team]\nregistry = "sparse+https://crates.example/index/"\n[registries.old]\nindex = "https://git.example/team/index"',
        },
        CARGO_REGISTRIES_MORE_INDEX="sparse+https://more.example/",
    )
    assert passes(profile, "https://crates.example/index/se/rd/serde")
    assert passes(profile, "https://more.example/config.json")
    assert passes(profile, "https://git.example/team/index/git-upload-pack", "POST")
    assert not passes(profile, "https://git.example/team/index/git-receive-pack", "POST")
    assert not passes(profile, "https://git.example/other/git-upload-pack", "POST")
    assert any("`dl`" in note for note in profile.notes)


@pytest.mark.parametrize(
    ("files", "programs", "environment"),
    [
        ({}, {}, {"GOPROXY": "https://go.example|https://second.example/mod,direct", "GOSUMDB": "sum.example"}),
        ({"~/.config/go/env": "GOPROXY=https://go.example,https://second.example/mod,direct\nGOSUMDB=sum.example\n"}, {}, {}),
        ({}, {"go": "case $2 in GOPROXY) echo https://go.example,https://second.example/mod,direct;; GOSUMDB) echo sum.example;; esac"}, {}),
    ],
)  # fmt: skip
def test_the_proxies_of_go(
    make: Make, files: dict[str, str], programs: dict[str, str], environment: dict[str, str]
) -> None:
    profile = make(files, programs, **environment)
    assert passes(profile, "https://go.example/x.example/m/@v/list")
    assert passes(profile, "https://second.example/mod/x/@latest")
    assert passes(profile, "https://sum.example/lookup/x@v1")
    assert not passes(profile, "https://sum.example/other")
    assert any("`direct`" in note for note in profile.notes)
    assert not passes(make(GOPROXY="off", GOSUMDB="off"), "https://go.example/x")


def test_credentials_of_urls_and_files_are_named_and_not_written(make: Make) -> None:
    profile = make(
        {"~/.npmrc": "registry=https://npm.example/team/\n//npm.example/team/:_authToken=npm-secret"},
        PIP_INDEX_URL="https://user:pip-secret@index.example/simple/",
    )
    text = profile.as_text() + "".join(profile.notes)
    assert "secret" not in text
    assert "user" not in text
    assert sum("needs a credential" in note for note in profile.notes) == 2
    assert passes(profile, "https://index.example/simple/x/")


def test_indices_that_no_rule_can_be_for_are_named(make: Make) -> None:
    profile = make(
        PIP_INDEX_URL="http://127.0.0.1:3141/root/simple/",
        PIP_EXTRA_INDEX_URL="http://devpi/simple file:///srv/simple https://x.example:99999/simple https://y.example/a/../simple",
    )
    assert "rules" not in profile.document
    assert sum("left out" in note for note in profile.notes) == 5


def test_an_index_at_a_private_address_is_allowed_to_be_there(make: Make) -> None:
    profile = make(PIP_INDEX_URL="https://index.example/simple/", addresses=lambda host: ["10.0.0.5", "fe80::1%eth0"])
    assert rules(profile)["pip"]["resolve"] == {"private": "allow"}
    assert any("private address" in note for note in profile.notes)


def test_a_proxy_of_this_machine_is_named_and_its_address_is_not_written(make: Make) -> None:
    profile = make(
        PIP_INDEX_URL="https://index.example/simple/", HTTPS_PROXY="http://user:proxy-secret@proxy.example:3128"
    )
    assert any("HTTPS_PROXY" in note for note in profile.notes)
    assert "proxy.example" not in profile.as_text() + "".join(profile.notes)


def test_a_tool_that_fails_or_answers_nonsense_is_as_one_that_is_not_there(make: Make) -> None:
    profile = make(programs={"python3": "exit 1", "npm": "echo undefined", "go": "exit 3"})
    assert "rules" not in profile.document
