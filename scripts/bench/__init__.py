"""What things cost here, as ratios from alternating turns."""
