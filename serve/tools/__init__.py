"""Commands beside the server: tune, doctor, and the client that other commands use."""
