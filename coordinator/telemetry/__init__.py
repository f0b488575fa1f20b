"""Measurements of a cell: metrics for Prometheus, and a history of the last minutes. Pure."""
