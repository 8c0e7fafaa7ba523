"""Metrics by the names of OpenTelemetry's semantic conventions for generative AI, as Prometheus writes them.

They are beside the router's own, so that tools which know the conventions need no translation. Labels are the
conventions' attributes.
"""

from baton.telemetry.metric import Metric

GENAI_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")

GENAI_DURATION = Metric(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "seconds",
    "gen_ai.server.request.duration: time from accepting a request to its end.",
    (*GENAI_LABELS, "error_type"),
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
GENAI_TTFT = Metric(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "seconds",
    "gen_ai.server.time_to_first_token: time from accepting a request to its first token.",
    GENAI_LABELS,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GENAI_TPOT = Metric(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "seconds",
    "gen_ai.server.time_per_output_token: mean time per output token after the first.",
    GENAI_LABELS,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
