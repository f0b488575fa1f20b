"""The state of ranks: roster, outliers, quarantined modes, why a layout is unreachable."""
