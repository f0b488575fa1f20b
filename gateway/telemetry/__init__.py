"""A gateway's metrics and logs."""
