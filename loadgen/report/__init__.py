"""Turns what happened into a report: records, series, tables, plots, comparisons."""
