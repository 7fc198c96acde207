"""What operators work with: roll-outs, the console, drift, tuning and planning."""
