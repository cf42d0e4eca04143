"""`hatchway e2b`: certificates for the domain under which ports of E2B's sandboxes have names."""

import datetime
from typing import Annotated

import typer

from .output import print_json
from .roles import DataDir, Json, data_folder, finish

group = typer.Typer(
    name="e2b", help="The API of E2B: certificates for a domain of its own.", no_args_is_help=True, rich_markup_mode=None
)  # fmt: skip

Domain = Annotated[str, typer.Option("--domain", help="Ports of sandboxes have names PORT-ID.DOMAIN.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group.command("certificate")(certificate)
    group.command("ca")(ca)
    app.add_typer(group)


def certificate(domain: Domain, data_dir: DataDir = None, json: Json = False) -> None:
    """Make a certificate for the domain and the names below it, signed by an authority of this installation, which is made at first.

    Prints what belongs into the settings file, and how clients come to trust it. Again: another certificate of the same authority.
    """

    def body() -> int:
        from hatchway.supervisor import certificates
        from hatchway.supervisor.settings import DEFAULT_E2B_PORT

        files = certificates.make_certificate(data_folder(data_dir), domain, datetime.datetime.now(datetime.UTC))
        name = files.folder.name
        if json:
            print_json(
                {"domain": name, "certificate": str(files.certificate), "key": str(files.key), "ca": str(files.authority)}
            )  # fmt: skip
            return 0
        print("In hatchway.toml:\n")
        # SDKs are told the domain as it stands there, and go to port 443 without one.
        print(f'[e2b]\ndomain = "{name}:{DEFAULT_E2B_PORT}"    # where `port` or `--e2b-port` is another: with that')
        print(f'certificate = "{files.certificate}"\nkey = "{files.key}"\n')
        print(_trust(str(files.authority)))
        return 0

    finish(body, json)


def ca(domain: Domain, data_dir: DataDir = None, json: Json = False) -> None:
    """Make the authority for the domain, where there is none yet, and say how clients come to trust it. It can vouch for this domain alone."""

    def body() -> int:
        from hatchway.supervisor import certificates

        files = certificates.make_authority(data_folder(data_dir), domain, datetime.datetime.now(datetime.UTC))
        if json:
            print_json({"domain": files.folder.name, "ca": str(files.authority)})
        else:
            print(_trust(str(files.authority)))
        return 0

    finish(body, json)


def _trust(path: str) -> str:
    return (
        "Where clients run:\n\n"
        f"SSL_CERT_FILE={path}          # Python: this authority and no other\n"
        f"NODE_EXTRA_CA_CERTS={path}    # JavaScript, and E2B's CLI\n\n"
        f"or, for all programs of a Debian machine: install -m 644 {path} /usr/local/share/ca-certificates/hatchway-e2b.crt && update-ca-certificates"
    )
