"""The control socket: its server, its clients, and the stream to subscribers."""
