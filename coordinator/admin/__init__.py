"""The admin port: its API, who may use it, and the live page."""
