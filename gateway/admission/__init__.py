"""Admission: API keys, rate limits, tiers, and permits for concurrent requests."""
