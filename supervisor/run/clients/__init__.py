"""The control socket: its server, its clients, and what is published over it."""
