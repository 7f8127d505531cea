"""What votes teach: scripted voters with hidden rules, over seeds."""
