"""What a checkout has beside the product, and the wheel does not."""
