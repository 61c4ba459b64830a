# Run inside train.py: overrides its global variables.
import sys
from ast import literal_eval

for word in sys.argv[1:]:
    name, given, value = word.removeprefix("--").partition("=")
    if not given:
        exec(open(word).read())
    elif name not in globals():
        raise ValueError(f"unknown: {name}")
    else:
        try:
            globals()[name] = literal_eval(value)
        except (SyntaxError, ValueError):
            globals()[name] = value
