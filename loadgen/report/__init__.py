"""The results of a run as values: made from records, written as JSON, read back, and drawn elsewhere.
Pure."""

from loadgen.report.make import judged, make_report
from loadgen.report.model import Figures, Percentiles, Report, ReportGroup, RunSettings, Share
from loadgen.report.sample import percentiles
from loadgen.slo import ClassObjectives, Slo

__all__ = [
    "ClassObjectives",
    "Figures",
    "Percentiles",
    "Report",
    "ReportGroup",
    "RunSettings",
    "Share",
    "Slo",
    "judged",
    "make_report",
    "percentiles",
]
