"""The console: pages on the management API that show what is served, and change it."""
