"""KV pages in host memory, which every rank of a cell reads in every width."""
