"""Judgements of what a survey saw: pure functions from a survey and a plan to checks, and from checks to a verdict.

Preflight, verification and diagnosis share them. No I/O, no clock, nothing but the arguments.
"""

from serving_catalog.checks.causes import likely_cause
from serving_catalog.checks.diagnosis import DiagnosisSettings, diagnose, diagnosis_survey
from serving_catalog.checks.models import SCHEMA_VERSION, Check, Verdict, accept, judged, request_of
from serving_catalog.checks.platforms import Detection, annotate, detect_platform
from serving_catalog.checks.preflight import DirectoryNeed, PreflightSettings, UrlNeed, plan_survey, preflight
from serving_catalog.checks.table import summary, table

__all__ = [
    "SCHEMA_VERSION",
    "Check",
    "Detection",
    "DiagnosisSettings",
    "DirectoryNeed",
    "PreflightSettings",
    "UrlNeed",
    "Verdict",
    "accept",
    "annotate",
    "detect_platform",
    "diagnose",
    "diagnosis_survey",
    "judged",
    "likely_cause",
    "plan_survey",
    "preflight",
    "request_of",
    "summary",
    "table",
]
