"""HTTP load generator for OpenAI-compatible servers: `python -m loadgen run|compare|plot`.

A client only: it imports nothing of the serving system and uses only HTTP. Arrivals, lengths,
prompts, SSE parsing and statistics are pure modules that take seeds and times as arguments;
`client`, `loops`, `runner`, `progress` and `plot` are the thin shell. All internal times are
seconds since the start of the run; reports are in milliseconds.
"""

__version__ = "1.0.0"
