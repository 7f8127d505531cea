"""Number formats with few bits, rounded exactly as the hardware rounds them."""
