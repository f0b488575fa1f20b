"""Turns the records of a run into a report: series, tables, plots, comparisons."""
