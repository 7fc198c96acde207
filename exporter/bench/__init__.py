"""`modelyard bench`: artifacts and the checkpoint they came from, measured side by side."""
