"""What a gateway measures, traces and logs."""
