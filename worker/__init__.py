"""The worker: loads a model and runs it."""
