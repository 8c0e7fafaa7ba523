"""A Redis that is no part of the release: with a password, and with TLS at a second port."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.pods.podman import podman
from tests.unit.deploy.chart import merged

PLAIN_PORT, TLS_PORT, PASSWORD = 6379, 6390, "secret7"


@dataclass(frozen=True)
class RedisOutside:
    """`folder` has its certificate and key, `redis.crt` and `redis.key`."""

    address: str
    image: str
    folder: Path
    label: str
    HOST: ClassVar[str] = "redis.example.com"
    """What its certificate names."""

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@{self.address}:{PLAIN_PORT}/0"

    def reached_by(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values under which policies let pods reach it, and no other address."""
        peers = [{"ipBlock": {"cidr": f"{self.address}/32"}}]
        return merged(values, {"redis": {"peers": peers}, "networkPolicy": {"extraEgress": []}})

    @asynccontextmanager
    async def running(self, *, is_wanted: bool) -> AsyncGenerator[None]:
        if not is_wanted:
            yield
            return
        name = f"{self.label}-redis-outside"
        server = ["redis-server", "--requirepass", PASSWORD, "--port", str(PLAIN_PORT)]
        server += ["--tls-port", str(TLS_PORT), "--tls-auth-clients", "no", "--bind", "0.0.0.0"]
        server += ["--tls-cert-file", "/c/redis.crt", "--tls-key-file", "/c/redis.key"]
        server += ["--tls-ca-cert-file", "/c/redis.crt"]
        await podman(
            *("run", "--detach", "--name", name, "--network", self.label, "--ip", self.address, "--user=0"),
            *("--pull=never", "--volume", f"{self.folder}:/c:ro", "--entrypoint", server[0], self.image),
            *server[1:],
        )
        try:
            yield
        finally:
            await podman("rm", "--force", "--time=0", name, check=False)
