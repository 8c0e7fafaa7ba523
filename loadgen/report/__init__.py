"""The results of a run as values: made from records, written as JSON, read back, and drawn elsewhere.
Pure."""

from loadgen.report.make import judged, make_report
from loadgen.report.model import Figures, Group, Percentiles, Report, Settings, Share
from loadgen.report.sample import percentiles
from loadgen.slo import Objectives, Slo

__all__ = [
    "Figures",
    "Group",
    "Objectives",
    "Percentiles",
    "Report",
    "Settings",
    "Share",
    "Slo",
    "judged",
    "make_report",
    "percentiles",
]
