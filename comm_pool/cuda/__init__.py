"""Ends CUDA collectives whose peer is lost, so that the surviving ranks continue."""
