"""What is known of ranks: the roster, outliers, drifted modes, why a layout is out of reach."""
