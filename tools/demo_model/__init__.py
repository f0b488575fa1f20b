"""Trains the demo model that ships with the product, and measures its loss."""
