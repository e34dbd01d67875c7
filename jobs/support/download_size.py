"""How many MB `pip install -r FILE` will load, said before it starts. Standard library alone: nothing is installed yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor


def size_of(url: str) -> int | None:
    """Bytes of a wheel: of the local file, or what its server says without sending it."""
    parts = urllib.parse.urlsplit(url)
    try:
        if parts.scheme == "file":
            return os.path.getsize(urllib.request.url2pathname(parts.path))
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, ValueError, TypeError):
        return None


def main(requirements: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check", "--report", "-"]
    done = subprocess.run([*command, "-r", requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        print("the download size is not known (pip could not resolve it in advance)")
        return
    wheels = [(item["metadata"]["name"], item["download_info"]["url"]) for item in json.loads(done.stdout)["install"]]
    with ThreadPoolExecutor(16) as pool:
        sizes = list(pool.map(lambda wheel: size_of(wheel[1]), wheels))
    known = [(size, name, url.startswith("file:")) for (name, url), size in zip(wheels, sizes, strict=True) if size is not None]
    local = sum(size for size, _, here in known if here)
    total = sum(size for size, _, here in known if not here)
    largest = ", ".join(f"{name} {size / 1e6:,.0f}" for size, name, _ in sorted(known, reverse=True)[:3])
    print(f"{len(wheels)} packages: {total / 1e6:,.0f} MB to load, {local / 1e6:,.0f} MB from local files (largest: {largest} MB)")
    if len(known) < len(wheels):
        print(f"({len(wheels) - len(known)} of them did not say how large they are)")


if __name__ == "__main__":
    main(sys.argv[1])
