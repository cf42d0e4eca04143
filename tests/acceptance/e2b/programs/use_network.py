"""Network settings of E2B's newest Python SDK, shown from within a sandbox: `use_network.py ALLOWED OTHER NAME OTHER_NAME`.

The addresses are of web sites, and the names lead to them, one to each. Prints one JSON object: what was tried, and the status that came of it.
"""

import json
import sys
from typing import Any

from e2b import Sandbox

EVERYTHING = "0.0.0.0/0"
tried: dict[str, str] = {}


def tell(sandbox: Any, *urls: str) -> None:
    """The last part of a URL's path is its key; the sites write down what arrives."""
    command = "; ".join(f"curl -s -m 60 -o /dev/null -w '%{{http_code}} ' {url}" for url in urls)
    came = sandbox.commands.run(f"{command}; true", timeout=180).stdout.split()
    tried.update({url.rpartition("/")[2]: status for url, status in zip(urls, came, strict=True)})


def main(allowed: str, other: str, name: str, other_name: str) -> None:
    settings = {"allow_out": [allowed], "deny_out": [EVERYTHING]}
    with Sandbox.create(network=settings, timeout=600) as sandbox:
        tell(sandbox, f"http://{allowed}/created-allowed", f"http://{other}/created-other")
        sandbox.update_network({"deny_out": [allowed]})
        tell(sandbox, f"http://{allowed}/updated-denied", f"http://{other}/updated-other")
        sandbox.update_network({"allow_out": [name], "deny_out": [EVERYTHING]})
        tell(sandbox, f"http://{name}/named-allowed", f"http://{other_name}/named-other")
    with Sandbox.create(allow_internet_access=False, timeout=600) as sandbox:
        tell(sandbox, f"http://{allowed}/without-internet")
    print(json.dumps(tried))


if __name__ == "__main__":
    main(*sys.argv[1:])
