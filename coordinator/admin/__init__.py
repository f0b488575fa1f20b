"""The admin port: its API, its access control, and the live page."""
