"""What can be wrong with a grammar."""


class GrammarError(Exception):
    """A grammar that cannot be followed; one line that is fit for the caller."""
