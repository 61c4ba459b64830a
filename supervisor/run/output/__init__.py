"""The numbers of a training, read from the output of any program."""
