"""Servers beyond one machine: cells of Ray Serve, and containers of KServe's."""
