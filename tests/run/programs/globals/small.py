# Overrides the values of train.py.
batch_size = 4  # of one process
