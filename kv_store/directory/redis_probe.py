"""Whether a server speaks plain Redis or TLS, asked when it did not answer as the URL has it."""

import asyncio
import contextlib
import ssl

PROBE_S = 1.0


async def speaks_plain(host: str, port: int) -> bool:
    """Whether the server answers PING as any Redis does, be it that it wants a password."""
    try:
        async with asyncio.timeout(PROBE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(b"PING\r\n")
                answer = await reader.readline()
            finally:
                writer.close()
    except (OSError, ValueError):  # TimeoutError is an OSError; ValueError: no line in a whole buffer
        return False
    return answer.startswith((b"+PONG", b"-NOAUTH", b"-DENIED", b"-LOADING"))


async def speaks_tls(host: str, port: int) -> bool:
    """Whether the server completes a handshake, or refuses it in TLS's own words. Its identity does not
    matter here."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(PROBE_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    return True
