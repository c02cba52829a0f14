"""What we measure: ``python -m bench engine pull router quality serve``, any of them.

Both sides of a question take turns in one run, so that what the machine does meanwhile hits both;
their ratio is what counts.
"""
