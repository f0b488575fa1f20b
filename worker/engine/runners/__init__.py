"""vLLM's model runners, one for each kind of device."""
