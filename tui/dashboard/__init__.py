"""The dashboard's screen, its panels and the actions that its keys start."""
