"""The HTTP layer that every request and answer passes: connection, checks, errors, routes."""
