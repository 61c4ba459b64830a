"""How an attempt ended: the evidence collected while it ran, and the diagnosis drawn from it."""
