"""Settings for those who operate a cluster: who they are, and what they look at. See `baton.config`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.config.base import Section


class AccessConfig(Section):
    """Who may drain, clear, flip and scale. The values are places, never the tokens themselves."""

    tokens: str = ""
    """File with the digests of the operators' tokens, see `baton tokens`; or env:NAME for a variable that
    holds such a file's text. Read again when it changes."""
    token: str = ""
    """What this process shows others when it drains, clears or flips: a file with a token, or env:NAME.
    Not needed by a process whose certificate is that of the control plane or of an operator."""


class DashboardConfig(Section):
    """What operators look at in a browser. Signing in takes a token of `access.tokens`."""

    enabled: bool = True
    """The control plane starts it."""
    host: str = "127.0.0.1"
    """Interface it listens on. Where that is not this machine's own, give it `tls_cert` and `tls_key`, or end
    TLS before it."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8070
    """0: any free one."""
    sample_s: Annotated[float, Field(ge=0.2, le=60)] = 1.0
    """Between two looks at the processes' metrics; longer by itself where there are more than 64 of them."""
    tls_cert: str = ""
    """PEM file of its certificate and those between it and its authority; empty: plain HTTP."""
    tls_key: str = ""
    """PEM file of that certificate's private key, not encrypted."""
    token_file: str = ""
    """Where a token for this start is written, for its owner to read, if `access.tokens` names none; empty:
    `baton serve` has a place for it in its run-time folder, and elsewhere nobody can sign in."""
    sessions_file: str = ""
    """Where it is remembered who is signed in, as digests; empty: `baton serve` has a place for it, and
    elsewhere a dashboard that starts anew asks everybody to sign in again."""

    @model_validator(mode="after")
    def _certificate_with_key(self) -> "DashboardConfig":
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ValueError(f"TLS needs tls_cert and tls_key: dashboard.{missing} is missing")
        return self


class TlsConfig(Section):
    """Mutual TLS between the processes of a cluster: with `ca`, `cert` and `key` every gRPC connection has
    it, without them none has. The paths are the same on all hosts, what the files hold need not be."""

    ca: str = ""
    """PEM file of the authorities whose certificates are this cluster's, see `baton certs`."""
    cert: str = ""
    """PEM file of this process's certificate, and of those between it and the authority. All three files are
    read again when they change: the next connection uses what they say then."""
    key: str = ""
    """PEM file of the certificate's private key, not encrypted."""
    domain: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,198}[a-z0-9])?$")] = "baton.internal"
    """A certificate names its holder PART.DOMAIN, where PART is control, router, worker, store or operator.
    Clusters whose certificates are of one authority differ in the domain."""

    @property
    def is_on(self) -> bool:
        return bool(self.ca)

    @model_validator(mode="after")
    def _all_or_none(self) -> "TlsConfig":
        files = {"ca": self.ca, "cert": self.cert, "key": self.key}
        if any(files.values()) and not all(files.values()):
            missing = ", ".join(f"tls.{name}" for name, path in files.items() if not path)
            raise ValueError(f"mutual TLS needs ca, cert and key: {missing} is missing")
        return self


class TelemetryConfig(Section):
    otlp_endpoint: str = ""
    """Where spans are sent (OTLP over gRPC), for example http://localhost:4317; empty: nowhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False
    """One JSON object per line instead of text."""
    log_requests: Literal["off", "troubled", "all"] = "troubled"
    """A line of the router's log for each request that ended: all of them, or those only that were refused,
    failed, missed an objective or needed more than one attempt (at most 50 lines a second)."""
