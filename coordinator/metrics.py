"""Prometheus metrics of the coordinator, read from the core's views when they are scraped.

Labels never hold anything that clients choose. Called by the admin API.
"""

from collections.abc import Iterator
