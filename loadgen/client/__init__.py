"""Sends the planned requests, times their streams and shows progress."""
