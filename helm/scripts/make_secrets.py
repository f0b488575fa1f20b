# ruff: noqa: INP001
"""Makes a Secret with random values for some keys, unless there is one: `NAME KEY...`.

Runs in a pod whose service account may create Secrets. It reads none: an existing one stays.
"""

import json
import os
import secrets
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount"))
"""Where Kubernetes mounts the account's token and the cluster's certificate."""
CHARS = 48
LIMIT_S = 20.0
EXISTS = 409


def secret(name: str, keys: list[str]) -> dict[str, object]:
    """Return the Secret with a new value for each key; the values are safe in URLs."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": json.loads(os.environ.get("LABELS", "{}"))},
        "stringData": {key: secrets.token_hex(CHARS // 2) for key in keys},
    }


def main(name: str, keys: list[str]) -> int:
    """Create the Secret; return 0 if it exists afterwards."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    url = f"https://{host}:{port}/api/v1/namespaces/{os.environ['NAMESPACE']}/secrets"
    request = urllib.request.Request(
        url,
        json.dumps(secret(name, keys)).encode(),
        {
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "Content-Type": "application/json",
        },
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        urllib.request.build_opener(*handlers).open(request, timeout=LIMIT_S).close()
    except urllib.error.HTTPError as error:
        if error.code == EXISTS:
            print(f"the Secret {name} exists and stays as it is")
            return 0
        print(f"the Secret {name} cannot be made: {error.code} {error.read(500).decode()}")
        return 1
    except OSError as error:
        print(f"the API server does not answer: {error}")
        return 1
    print(f"the Secret {name} is made")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: make_secrets.py NAME KEY...")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
