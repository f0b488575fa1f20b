"""The load of a run: arrivals, lengths, prompts, traces, and the plan made of them."""
