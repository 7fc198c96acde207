"""Several servers of the same models behind one port: `modelyard serve start --servers N`.

The kernel gives each new connection to one of them (SO_REUSEPORT). Their parent serves management
and metrics, speaks to all, and starts again what has died; no prediction passes through it.
"""
