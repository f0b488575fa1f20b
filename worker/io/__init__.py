"""What a rank sends and receives: its session, step queue and token streams."""
