"""vLLM 0.32.0 as the front end: its app, its engine wire format, grammars and media."""
