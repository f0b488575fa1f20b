"""What every HTTP request and answer passes: connection, body checks, errors, routes."""
