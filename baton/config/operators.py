"""Settings for those who operate a cluster: access, dashboard, TLS, telemetry. See `baton.config`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.config.base import Section


class AccessConfig(Section):
    """Access of operators, who drain, clear, switch roles and scale.

    The values are places of tokens, never the tokens themselves.
    """

    tokens: str = ""
    """File with the digests of the operators' tokens, see `baton tokens`, or env:NAME for a variable that
    holds such a file's text. It is read again when it changes."""
    token: str = ""
    """Token that this process shows others when it drains, clears or switches roles: a file, or env:NAME. A
    process with a certificate of the control plane or of an operator needs none."""


class DashboardConfig(Section):
    """The web page for operators. Signing in takes a token of `access.tokens`."""

    enabled: bool = True
    """Whether the control plane starts a dashboard."""
    host: str = "127.0.0.1"
    """Interface that the dashboard listens on. Where that is not this machine's own, set `tls_cert` and
    `tls_key`, or end TLS in front of it."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8070
    """Port of the dashboard. 0: any free port."""
    sample_s: Annotated[float, Field(ge=0.2, le=60)] = 2.0
    """Seconds between two readings of the processes' metrics. They grow where there are more than 128
    processes."""
    tls_cert: str = ""
    """PEM file of its certificate and its intermediate authorities. Empty: plain HTTP."""
    tls_key: str = ""
    """PEM file of that certificate's private key, not encrypted."""
    token_file: str = ""
    """File that receives a token for this start, readable by its owner, if `access.tokens` names none. Empty:
    `baton serve` has a place in its run-time folder, and elsewhere nobody can sign in."""
    sessions_file: str = ""
    """File that keeps the digests of signed-in sessions. Empty: `baton serve` has a place for it, and
    elsewhere a restarted dashboard asks everybody to sign in again."""

    @model_validator(mode="after")
    def _certificate_with_key(self) -> "DashboardConfig":
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ValueError(f"TLS needs tls_cert and tls_key: dashboard.{missing} is missing")
        return self


class TlsConfig(Section):
    """Mutual TLS between the processes of a cluster. With `ca`, `cert` and `key` every gRPC connection uses
    it; without them none does. The paths are the same on all hosts, the contents need not be."""

    ca: str = ""
    """PEM file of the authorities whose certificates belong to this cluster, see `baton certs`."""
    cert: str = ""
    """PEM file of this process's certificate and its intermediate authorities. All three files are read again
    when they change, for the next connection."""
    key: str = ""
    """PEM file of the certificate's private key, not encrypted."""
    domain: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,198}[a-z0-9])?$")] = "baton.internal"
    """Domain of the cluster. A certificate names its holder PART.DOMAIN, where PART is control, router,
    worker, store or operator. Clusters whose certificates have one authority need different domains."""

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
    """Address that spans are sent to: OTLP over gRPC, for example http://localhost:4317, and with a path OTLP
    over HTTP, for example http://localhost:4318/v1/traces. Empty: no spans are sent."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False
    """Whether log lines are JSON objects instead of text."""
    log_requests: Literal["off", "troubled", "all"] = "troubled"
    """Requests that get a line in the router's log when they end. troubled: those that were refused, failed,
    missed an objective or needed more than one attempt. At most 50 lines are written per second."""
