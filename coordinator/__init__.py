"""The coordinator of a cell: task pool, switch protocol, gRPC server and admin API.

It imports neither torch nor vLLM. `coordinator.protocol` is what gateways and ranks share with it.
"""
