"""Other protocols' request and answer forms around a handler (the server's `service_envelope`)."""
