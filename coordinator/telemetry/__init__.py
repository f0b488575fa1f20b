"""What a cell measures and keeps of the last minutes, and how Prometheus sees it. Pure."""
