"""Moves running tasks and their KV at a switch: manifest, plan, copy rounds, commit."""
