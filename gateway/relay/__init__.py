"""Requests on their way to the coordinator, and tokens on their way back."""
