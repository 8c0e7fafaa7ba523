"""Logs: the standard library's, one line per event, as text for people or JSON for collectors."""

import json
import logging
import sys

from baton.config import TelemetryConfig


class _JsonLines(logging.Formatter):
    """Formatter of JSON lines. The keys of a record's `fields` (`extra={"fields": {...}}`) become keys of the
    line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logs(process: str, config: TelemetryConfig) -> None:
    """Replace the root logger's handlers by one that writes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_json:
        handler.setFormatter(_JsonLines(process))
    else:
        text = f"%(asctime)s %(levelname)-7s {process} %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(text, "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(config.log_level.upper())
    # Libraries that talk about every request or connection.
    for chatty in ("httpx", "httpcore", "uvicorn.access", "ray", "grpc", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
