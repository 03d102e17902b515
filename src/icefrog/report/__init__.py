"""Reports: metrics, tables, plots and one HTML page, folded from the event log alone."""

from icefrog.report.metrics import summarise
from icefrog.report.record import JobRecord, RunRecord, fold
from icefrog.report.tables import summary_document, write_jobs_csv, write_summary
from icefrog.report.terminal import render_comparison, render_table

__all__ = [
    "JobRecord",
    "RunRecord",
    "fold",
    "render_comparison",
    "render_table",
    "summarise",
    "summary_document",
    "write_jobs_csv",
    "write_summary",
]
