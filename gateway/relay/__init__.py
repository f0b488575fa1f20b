"""Carries requests to the coordinator and tokens back."""
