"""What a run sends: arrivals, lengths, prompts, traces, and the plan made of them."""
