"""vLLM 0.32.0 as the engine of a rank. No other folder of the worker imports vLLM."""
