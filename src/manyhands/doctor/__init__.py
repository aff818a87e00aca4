from manyhands.doctor.checks import Check, Report
from manyhands.doctor.examination import Examination

__all__ = ["Check", "Examination", "Report"]
