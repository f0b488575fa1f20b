"""Who may ask how often, and how many are answered at once: keys, rates, tiers, permits."""
