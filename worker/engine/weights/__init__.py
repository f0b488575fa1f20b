"""One replica of the weights, and module trees made of views of it."""
