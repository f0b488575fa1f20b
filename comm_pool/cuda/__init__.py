"""Ends CUDA collectives whose peer is lost, so that the ranks that are left go on."""
