"""Starts the rank processes of a host, watches them and restarts them."""
