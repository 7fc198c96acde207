"""HTTP: parse → one call → format. One module per audience."""
