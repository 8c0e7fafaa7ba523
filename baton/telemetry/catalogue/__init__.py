"""Every metric Baton exports. Code, documentation, dashboards and alerts derive from this list."""

from baton.telemetry.catalogue.control_plane import *  # noqa: F403
from baton.telemetry.catalogue.genai import *  # noqa: F403
from baton.telemetry.catalogue.router import *  # noqa: F403
from baton.telemetry.catalogue.store_node import *  # noqa: F403
from baton.telemetry.catalogue.worker import *  # noqa: F403
from baton.telemetry.metric import Metric

CATALOGUE: tuple[Metric, ...] = tuple(v for v in list(globals().values()) if isinstance(v, Metric))
