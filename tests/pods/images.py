"""The images that are run, and what a host needs to run them."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.pods.podman import call

ROOT = Path(__file__).parents[2]
NEEDED = ("podman", "nsenter", "iptables", "openssl")


def check_host() -> str:
    """What is missing on this host, or nothing."""
    missing = [one for one in NEEDED if not shutil.which(one)]
    if sys.platform != "linux" or missing:
        return f"pods need Linux with {', '.join(missing or NEEDED)}"
    if os.geteuid() != 0:
        return "pods need root: their networks get rules, and their volumes owners"
    return ""


async def build(kinds: Sequence[str], base: str | None, options: Sequence[str]) -> None:
    """Build the images with podman. Raises PodmanError if one fails."""
    for kind in kinds:
        args = ["--format=docker", "--layers", "-f", str(ROOT / f"deploy/docker/Dockerfile.{kind}"), *options]
        args += [f"--build-arg=BASE={base}"] if base else []
        await call("podman", "build", *args, "-t", f"localhost/baton/{kind}:0.1.0", str(ROOT), timeout_s=3600)
