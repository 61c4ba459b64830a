"""Why an attempt ended: the evidence that is collected while it runs, and the diagnosis."""
