"""gRPC on grpcio: a face of the server on a port of its own, and the services that it serves."""
