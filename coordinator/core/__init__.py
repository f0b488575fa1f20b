"""The core that decides for a cell, its views, and the state of its gateways. Pure."""
